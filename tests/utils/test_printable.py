"""Text that is shown: no terminal obeys it, every parser of XML takes it."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.schedules.report.palette import markup
from megatron.schedules.utils.errors import one_line
from megatron.schedules.utils.printable import printable, printable_name

ANY_TEXT = st.text(st.characters(exclude_categories=[]))  # halves of surrogate pairs, too


@given(ANY_TEXT)
def test_what_is_shown_is_printable_and_can_be_encoded(text: str):
    for shown in (printable(text), printable_name(text), one_line(text)):
        assert shown.isprintable()
        shown.encode()


@given(ANY_TEXT)
def test_xml_takes_any_text(text: str):
    element = ElementTree.fromstring(f'<a b="{markup(text)}">{markup(text)}</a>')
    assert (element.text or "", element.get("b")) == (printable(text),) * 2


@given(ANY_TEXT.filter(str.isprintable))
def test_what_is_printable_stays_as_it_is(text: str):
    assert printable(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred", r"\x1b[31mred"),
        ("\x9b31m", r"\x9b31m"),
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("a\nb\tc\u2028d", "a b c d"),
        ("\udcff", r"\udcff"),
        ("user\u202etxt.exe", r"user\u202etxt.exe"),
        ("\x00", r"\x00"),
        ("NVIDIA H200, Größe 日本 🙂", "NVIDIA H200, Größe 日本 🙂"),
    ],
)
def test_what_is_not_printable_shows_its_escape(text: str, shown: str):
    assert printable(text) == shown


def test_a_long_name_is_cut_in_its_middle():
    shown = printable_name("begin" + "x" * 1_000_000 + "end")
    assert len(shown) <= 80
    assert (shown[:5], shown[-3:]) == ("begin", "end")
    assert "..." in shown


def test_a_message_that_quotes_a_file_is_not_as_long_as_the_file():
    assert len(one_line("begin " + "some words " * 100_000 + " end")) < 5000
