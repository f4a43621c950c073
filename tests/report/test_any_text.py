"""Names may be any text: every drawing stays well-formed, and shows it in printable characters."""

from __future__ import annotations

import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from megatron.schedules.measure.recorded_run import Recorded
from megatron.schedules.report.drawing import FILES, Drawing, drawn, of_plans, of_run, write_run
from megatron.schedules.report.frontier_svg import Mark, Point, draw_frontier
from megatron.schedules.report.table import Row, as_markdown, as_text
from megatron.schedules.report.text import draw_text
from megatron.schedules.report.views import View
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.simulator import Timeline
from tests.measure.test_recorded_run import made
from tests.report.made import timeline
from tests.tiers import of_which_by_day

NAMES = {
    "an escape sequence": "\x1b]0;title\x07\x1b[2J",
    "C1 controls": "\x9b31m\x85",
    "NUL": "a\0b",
    "no character of XML": "\ufffe\uffff\x0b\x1f",
    "half a surrogate pair": "\ud800 \udfff",
    "the end of a script": "</script><script>alert(1)</script>",
    "the end of a title": "</title></svg>]]>--><!--",
    "line separators": "a\u2028b\u2029c\nd\re",
    "another direction": "\u202egnp.exe",
    "entities": "&amp;&#0;&<\"'>",
    "Markdown": "a | b\n| --- |",
    "too long": "x" * 1_000_000,
}
SOME = of_which_by_day(NAMES, "C1 controls", "half a surrogate pair", "the end of a script", "too long")


def run_named(name: str) -> Recorded:
    recorded = made(Costs())
    schedule = replace(recorded.timeline.schedule, name=name)
    measured, planned = (replace(each, schedule=schedule) for each in (recorded.timeline, recorded.planned))
    return replace(recorded, timeline=measured, planned=planned, device=name)


def drawings(name: str) -> list[Drawing]:
    """Of a run with this name, of plans with it, and with it in every text that a drawing has."""
    line = run_named(name).timeline
    return [of_run(run_named(name)), of_plans([line], name, name), Drawing([View(name, line)], name, name, name)]


def printable_lines(text: str) -> bool:
    return all(line.isprintable() for line in text.split("\n"))


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("which", [0, 1, 2], ids=["a run", "plans", "every text"])
def test_an_svg_is_well_formed_xml(name: str, which: int):
    name = NAMES[name][: None if which == 0 else 200]
    text = drawn(drawings(name)[which], "svg")
    assert {element.tag.rpartition("}")[2] for element in ElementTree.fromstring(text.encode()).iter()} <= {
        *("svg", "title", "desc", "style", "rect", "text", "tspan", "path", "g")
    }
    assert printable_lines(text)
    assert len(text) < 200_000


class _Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: object) -> None:
        self.tags.append(tag)


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("which", [0, 1, 2], ids=["a run", "plans", "every text"])
def test_a_page_has_the_elements_it_has_for_any_other_name(name: str, which: int):
    name = NAMES[name][: None if which == 0 else 200]
    text = drawn(drawings(name)[which], "html")
    plain = drawn(drawings("plain")[which], "html")
    assert _Tags(text).tags == _Tags(plain).tags
    assert text.count("</script>") == plain.count("</script>") == 3
    assert printable_lines(text)
    assert len(text) < len(plain) + 10_000


@pytest.mark.parametrize("name", SOME)
def test_a_trace_is_json_in_ascii(name: str):
    for drawing in drawings(NAMES[name][:200]):
        text = drawn(drawing, "trace")
        assert text.isascii() and text.isprintable()
        assert json.loads(text)["traceEvents"]


@pytest.mark.parametrize("colour", [False, True])
@pytest.mark.parametrize("name", SOME)
def test_a_terminal_is_sent_printable_text(name: str, colour: bool):
    for drawing in drawings(NAMES[name][:200]):
        assert printable_lines(draw_text([view.timeline for view in drawing.shown], 80, colour, drawing.labels).plain)


@pytest.mark.parametrize("name", SOME)
def test_a_frontier_is_well_formed_xml(name: str):
    text = NAMES[name][:200]
    drawing = draw_frontier([Point(1, 0.2, 0.1)], [Mark(text, text, 1, 0.1)], text, text, (2.0, 0.3))
    ElementTree.fromstring(drawing.encode())
    assert printable_lines(drawing)


@pytest.mark.parametrize("name", SOME)
def test_a_run_is_written_whatever_its_names_are(name: str, tmp_path: Path):
    assert write_run(run_named(NAMES[name]), tmp_path) == [*FILES, "recorded.json"]


@pytest.mark.parametrize("name", SOME)
def test_a_table_has_a_line_a_row(name: str):
    text = NAMES[name][:200]
    rows = [Row(text, text), Row("1f1b", text)]
    found = as_markdown(rows).splitlines()
    assert len(found) == 4
    assert {line.replace("\\|", "").count("|") for line in found[2:]} == {8}
    for each in (as_text(rows), as_markdown(rows)):
        assert printable_lines(each)


def test_a_name_is_shown_with_its_escapes():
    assert "V\\x1b[2j" in drawn(of_plans([replace_name("v\x1b[2J")], "", ""), "svg")


def replace_name(name: str) -> Timeline:
    line = timeline("v-half", 2, 2)
    return replace(line, schedule=replace(line.schedule, name=name))
