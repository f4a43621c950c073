"""How much room words take."""

from __future__ import annotations

from megatron.schedules.report.palette import lines, width
from tests.report.fonts import measured

WORDS = "8 pipeline ranks, 32 microbatches; half a rank's layers take F 1, I 1.1, W 0.75; P2P latency 0.05."


def test_no_word_is_wider_than_it_is_taken_for():
    assert all(measured(chr(code), 11) <= width(chr(code), 11) for code in range(32, 127))
    assert measured(WORDS, 11) <= width(WORDS, 11) <= 1.08 * measured(WORDS, 11)


def test_lines_have_all_words_and_keep_to_the_room():
    found = lines(WORDS, 11, 200)
    assert " ".join(found) == WORDS
    assert len(found) > 2
    assert max(measured(line, 11) for line in found) <= 200
    assert lines("a-word-that-is-too-long for it", 11, 20) == ["a-word-that-is-too-long", "for", "it"]
    assert lines("", 11, 20) == []
