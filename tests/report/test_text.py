"""The drawing in the terminal."""

from __future__ import annotations

import re

import pytest
from rich.style import Style

from benchmarks.uneven_layers import uneven
from megatron.schedules.report import palette
from megatron.schedules.report.text import draw_text
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.kinds import KINDS, Kind
from megatron.schedules.schedule.simulator import simulate
from tests.report.made import saved, timeline
from tests.tiers import by_night


def rows(plain: str) -> list[str]:
    """The lines that show a rank, without the rank's name and the memory."""
    found = [line for line in plain.splitlines() if line.startswith("rank ")]
    return [re.sub(r"^rank \d+ +?(?= |\S)", "", line) for line in found]


@pytest.mark.parametrize("name", ["1f1b", "v-half", "interleaved-1f1b", "zb-2p"])
@pytest.mark.parametrize("n", [1, 5, 8])
def test_letters_spell_the_order(name, n):
    line = timeline(name, 4, n)
    plain = draw_text([line], 200, colour=False).plain
    placement = line.schedule.placement
    for row, order in zip(rows(plain), line.schedule.order, strict=True):
        letters = [work.kind.value.lower() if placement.chunk_of(work.stage) % 2 else work.kind.value for work in order]
        assert re.findall("[FIWBfiwb]", row) == letters


def test_the_drawing_of_a_small_1f1b():
    plain = draw_text([timeline("1f1b", 2, 2)], 60, colour=False).plain
    assert [line.rstrip() for line in plain.splitlines()][2:9] == [
        "rank 0  F---F---        B-------    B-------  ████████ 2",
        "        0   1           0           1",
        "rank 1      F---B-------F---B-------          ████     1",
        "            0   0       1   1",
        "        0         5         10        15",
        "bubble       33.33 % (iteration time 18)",
        "span bubble  33.33 %, on the worst rank from its own first start",
    ]


def test_cells_are_coloured_by_kind_and_chunk_and_numbered():
    line = timeline("v-half", 4, 8)
    text = draw_text([line], 100, colour=True)
    row = next(piece for piece in text.split("\n") if piece.plain.startswith("rank 0"))
    painted = [(row.plain[span.start : span.end], span.style) for span in row.spans]
    backgrounds = []
    for work in line.schedule.order[0]:
        chunk = line.schedule.placement.chunk_of(work.stage)
        backgrounds.append(palette.hexadecimal(palette.fill(work.kind, chunk, 2)))
    cells = [(cell, style) for cell, style in painted if isinstance(style, Style) and style.bgcolor]
    assert [style.bgcolor.name for _, style in cells] == backgrounds
    assert [cell.strip() for cell, _ in cells] == [str(work.microbatch) for work in line.schedule.order[0]]


@pytest.mark.parametrize(
    ("colour", "width", "numbered"), [(False, 270, "B"), (False, 520, "FB"), (True, 140, "B"), (True, 270, "FB")]
)
def test_passes_of_one_length_all_have_their_numbers_or_none_has(colour, width, numbered):
    """Where 12 does not fit, 9 is not there either; without colours there is a space between numbers, too."""
    line = timeline("1f1b", 4, 32, "2,1.5,2.5,0")  # B takes twice as long as F
    first, *below = draw_text([line], width, colour).split("\n")[2:]
    cells = [first.plain[span.start : span.end].strip() for span in first.spans if getattr(span.style, "bgcolor", None)]
    found = [cell for cell in cells if cell] if colour else below[0].plain.split()
    order = line.schedule.order[0]
    assert found == [str(work.microbatch) for work in order if work.kind.value in numbered]


@pytest.mark.parametrize("colour", [False, True])
@pytest.mark.parametrize(
    ("name", "d", "n", "width"),
    [
        ("v-half", 4, 8, 100),
        by_night("v-half", 32, 128, 100),
        ("1f1b", 2, 1, 80),
        ("v-zb", 3, 300, 60),
        ("zb-1p", 64, 3, 140),
    ],
)
@pytest.mark.parametrize("costs", ["1,1,1,0", "1,1.1,0.75,0.05"])
def test_the_drawing_keeps_to_the_width(name, d, n, width, costs, colour):
    plain = draw_text([timeline(name, d, n, costs)], width, colour).plain
    drawn = [line for line in plain.splitlines() if line.startswith("rank ")]
    assert len(drawn) == d
    assert max(map(len, drawn)) <= width


def test_a_column_longer_than_a_pass_shows_the_share_computed():
    line = timeline("1f1b", 4, 64)
    plain = draw_text([line], 60, colour=False).plain
    assert not re.search("[FB]", "".join(rows(plain)))
    row = rows(plain)[3]
    assert row.lstrip().startswith(("░", "▒", "▓", "█"))
    # Rank 3 of 1F1B waits for the first forward and then never idles before its end.
    assert set(row.strip().split(" ")[0][1:-1]) == {"█"}
    assert "a wider terminal shows more" in plain


def test_several_timelines_share_one_scale():
    text = draw_text([timeline("1f1b", 4, 8), timeline("v-half", 4, 8)], 150, colour=False).plain
    first, second = text.split("V-Half")
    assert "(iteration time 66)" in first
    assert "(iteration time 53)" in second
    assert rows(first)[0].index("█") == rows(second)[0].index("█")
    # 1F1B's pass takes twice as long as one of V-Half's two chunks.
    assert rows(first)[0].lstrip().startswith("F-F-F-F-")
    assert rows(second)[0].lstrip().startswith("FFFF")


def test_the_summary_says_bubble_and_memory():
    plain = draw_text([timeline("v-half", 4, 8)], 100, colour=False).plain
    line = timeline("v-half", 4, 8)
    assert f"bubble       {100 * line.bubble:.2f} % (iteration time {line.makespan:g})" in plain
    assert "peak memory  3 microbatches of activations on rank 0, 75.0 % of 1F1B's 4" in plain


def test_memory_has_its_unit_and_is_in_gib_too_where_a_model_says_what_a_microbatch_takes():
    line = timeline("v-half", 4, 8)
    plain = draw_text([line], 100, colour=False, microbatch_bytes=0.5 * 2**30).plain
    assert "peak memory  3 microbatches (1.50 GiB) of activations on rank 0, 75.0 % of 1F1B's 4" in plain
    assert "peak memory, microbatches (GiB)" in plain
    assert rows(plain)[0].endswith(" 3 (1.50 GiB)")
    assert max(map(len, plain.splitlines())) <= 100
    one = draw_text([timeline("1f1b", 2, 1)], 100, colour=False).plain
    assert "peak memory  1 microbatch of activations" in one


def test_1f1b_above_its_own_memory_is_explained_below():
    even = timeline("1f1b", 4, 8)
    more = simulate(even.schedule, uneven(Costs(), (1,) * 4, (1.3, 0.9, 0.9, 0.9)).on(even.schedule.placement))
    assert "under 1F1B too." in draw_text([more], 100, colour=False).plain
    assert "under 1F1B too." not in draw_text([even], 100, colour=False).plain


@pytest.mark.parametrize("width", [1, 10, 40])
def test_a_narrow_terminal_still_gets_a_drawing(width):
    assert "peak memory" in draw_text([timeline("v-min", 4, 8)], width, colour=True).plain


def test_the_legend_names_what_was_drawn_and_no_more():
    whole = draw_text([timeline("1f1b", 4, 8)], 100, colour=False).plain
    assert KINDS[Kind.B].meaning in whole
    assert KINDS[Kind.W].meaning not in whole
    assert "capitals" not in whole
    assert "small letters: chunk 1" in draw_text([timeline("v-zb", 4, 8)], 100, colour=False).plain


@pytest.mark.parametrize("one_way", [False, True])
def test_copies_are_spelled_below_what_is_computed(one_way):
    line = saved(one_way=one_way)
    plain = draw_text([line], 300, colour=False).plain
    spelled = [re.findall("[FIWBRfiwbr]", row) for row in rows(plain)]
    placement = line.schedule.placement
    for letters, order in zip(spelled, line.schedule.order, strict=True):
        named = [work.kind.lower() if placement.chunk_of(work.stage) else str(work.kind) for work in order]
        assert letters == [name for name in named if name not in "OLol"]
    for label, kinds in {"O L": "OL"}.items() if one_way else {"O": "O", "L": "L"}.items():
        found = [text.removeprefix(f"   {label}") for text in plain.splitlines() if re.match(rf"   {label}  ", text)]
        expected = [[str(copy.work.kind) for copy in copies if copy.work.kind in kinds] for copies in line.copies]
        assert [re.findall("[OLol]", row) for row in found] == expected
    assert f"recompute    {100 * line.recomputed:.2f} % of computing; without it" in plain
    assert f"copying      {100 * line.copying:.2f} % of the time on the busiest copy channel" in plain
    assert "copying" not in draw_text([timeline("v-half", 4, 8)], 100, colour=False).plain
    assert "messages" not in plain
    line = timeline("v-zb", 4, 8, "1.3,1.4,1,0,0.3")
    hidden, exposed = (f"{100 * share:.2f} %" for share in line.messages)
    said = f"messages     {hidden} of the time hidden behind weight gradients, {exposed} exposed"
    assert said in draw_text([line], 100, colour=False).plain


@pytest.mark.parametrize("colour", [False, True])
@pytest.mark.parametrize("width", [60, 100, 300])
def test_a_drawing_with_copies_keeps_to_the_width(width, colour):
    plain = draw_text([saved(8, 16), saved(4, 8, one_way=True)], width, colour).plain
    assert max(len(line) for line in plain.splitlines() if re.match("rank|   [OL]", line)) <= width
