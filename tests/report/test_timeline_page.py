"""The page of a timeline, in a real browser: all passes where they belong, nothing from the network, quick to zoom."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from megatron.schedules.measure.recorded_run import Recorded
from megatron.schedules.report.drawing import Drawing, drawn, of_plans, of_run
from megatron.schedules.report.idle import Cause, gaps
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.kinds import Kind, Pass
from megatron.schedules.schedule.simulator import Timeline, simulate
from tests.measure.test_recorded_run import made
from tests.report.chromium import Chromium, found
from tests.report.made import saved, timeline

PROGRAM = found()
in_a_browser = pytest.mark.skipif(
    PROGRAM is None, reason="needs Chromium: apt-get install chromium, or name it in CHROMIUM"
)

Open = Callable[[Drawing], Chromium]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    assert PROGRAM is not None
    with Chromium(PROGRAM, tmp_path_factory.mktemp("profile")) as running:
        yield running


@pytest.fixture
def opened(browser: Chromium, tmp_path: Path) -> Open:
    def open_page(drawing: Drawing) -> Chromium:
        browser.events.clear()
        path = tmp_path / "timeline.html"
        path.write_text(drawn(drawing, "html"), encoding="utf-8")
        browser.open(path)
        return browser

    return open_page


def test_it_names_no_address_and_is_bound_to_need_none():
    page = drawn(of_run(made(Costs())), "html")
    assert "://" not in page and not re.search(r"\b(src|href|import)\s*[=(]", page)
    assert "default-src 'none'" in page and "unsafe" not in page


def test_names_cannot_end_the_script():
    recorded = made(Costs())
    evil = "</script><b>"
    schedule = replace(recorded.timeline.schedule, name=evil)
    each = replace(recorded.timeline, schedule=schedule)
    page = drawn(of_run(replace(recorded, timeline=each, device=evil)), "html")
    assert page.lower().count("</script><b>") == 0
    assert page.count("<script") == page.count("</script>") == 3


@in_a_browser
def test_it_opens_without_errors_and_without_a_network(opened: Open):
    page = opened(of_run(made(Costs.of(1.5, 1.25, 0.75, 0.5))))
    assert page.complaints() == []
    assert [address for address in page.requests() if not address.startswith("file:")] == []
    assert len(page.requests()) == 1
    # The policy holds: even a script that asks is refused.
    assert page.value("fetch('data:,x').then(() => 'let through', () => 'refused')") == "refused"


@in_a_browser
@pytest.mark.parametrize("lines", ["plain", "copies"])
def test_every_pass_is_there_and_where_it_belongs(opened: Open, lines: str):
    line = timeline("v-half", 4, 8, "1,1.1,0.75,0.05") if lines == "plain" else saved()
    page = opened(of_plans([line], "", ""))
    assert (page.value("timeline.last.drawn"), page.value("timeline.last.merged")) == (
        page.value("timeline.passes[0]"),
        0,
    )
    view = "timeline.chart.views[0]"
    letters = page.value("page.kinds.map((each) => each.letter)")
    kinds, stages, microbatches, starts, ends = (
        page.value(f"Array.from({view}.{name})") for name in ("kind", "stage", "microbatch", "start", "end")
    )
    place = page.value(f"Array.from({{length: {view}.passes}}, (_, i) => {view}.place(i))")
    there = {
        Pass(stage, Kind(letters[kind]), m): (rank, lane, start, end)
        for kind, stage, m, start, end, (rank, lane) in zip(
            kinds, stages, microbatches, starts, ends, place, strict=True
        )
    }
    expected = {
        work: (rank, 0, start, end)
        for rank, row in enumerate(line.schedule.order)
        for work, start, end in zip(row, line.start[rank], line.end[rank], strict=True)
        if end > start
    }
    for rank, copies in enumerate(line.copies):
        expected |= {each.work: (rank, 1 if each.work.kind is Kind.O else 2, *each[1:]) for each in copies}
    assert there.keys() == expected.keys()
    for work, (*where, start, end) in expected.items():
        assert there[work] == (*where, pytest.approx(start, abs=1e-6), pytest.approx(end, abs=1e-6))


@in_a_browser
def test_what_each_rank_waited_for_is_told(opened: Open):
    line = timeline("v-half", 4, 8, "1,1.1,0.75,0.05")
    page = opened(of_plans([line], "", ""))
    view = "timeline.chart.views[0]"
    told = page.value(
        f"Array.from({view}.awaited, (to, i) => to < 0 ? null : [name({view}, i), name({view}, to)]).filter(Boolean)"
    )
    order = line.schedule.order
    expected = {
        str(order[rank][gap.at]): str(order[gap.needed[0]][gap.needed[1]])
        for rank, row in enumerate(gaps(line))
        for gap in row
        if gap.needed
    }
    assert dict(told) == expected
    assert all(
        wait.cause in (Cause.PASS, Cause.MESSAGE, Cause.DONE) for row in gaps(line) for gap in row for wait in gap.waits
    )


@in_a_browser
def test_memory_is_that_of_the_run(opened: Open):
    recorded = made(Costs.of(1.5, 1.25, 0.75, 0.5))
    page = opened(of_run(recorded))
    for rank, steps in enumerate(recorded.held):
        assert page.value(f"timeline.chart.views[1].peak({rank})") == pytest.approx(max(held for _, held in steps))
        for (time, held), (later, _) in pairwise(steps):
            if later - time > 1e-3:
                at = f"timeline.chart.views[1].heldAt({rank}, {(time + later) / 2})"
                assert page.value(at) == pytest.approx(held)
    assert page.value("timeline.chart.views.map((view) => view.unit)") == ["microbatches", "bytes"]


@in_a_browser
def test_many_passes_are_seen_one_by_one_by_zooming(opened: Open):
    """Far out columns stand for all that is there; near, every pass is painted on its own in some window."""
    line = timeline("1f1b", 4, 400)
    page = opened(of_plans([line], "", ""))
    passes = sum(map(len, line.schedule.order))
    last = page.value("timeline.last")
    assert (last["drawn"], last["merged"]) == (0, passes)
    assert page.value("timeline.seen[0]") == 0
    windows = 16
    for index in range(windows):
        edges = (index * line.makespan / windows, (index + 1) * line.makespan / windows)
        last = page.value(f"timeline.show({edges[0]}, {edges[1]})")
        visible = sum(
            start < edges[1] and end > edges[0]
            for starts, ends in zip(line.start, line.end, strict=True)
            for start, end in zip(starts, ends, strict=True)
        )
        assert last["drawn"] == pytest.approx(visible, abs=8)
    assert page.value("timeline.seen[0]") == passes


@in_a_browser
def test_wheel_drag_keys_and_buttons(opened: Open):
    page = opened(of_run(made(Costs())))

    def shown() -> tuple[float, float]:
        first, last = page.value("new Promise((r) => requestAnimationFrame(() => r(timeline.window)))")
        return first, last

    def long() -> float:
        first, last = shown()
        return last - first

    whole, box = long(), page.value("document.getElementById('rows').getBoundingClientRect().toJSON()")
    x, y = box["left"] + 600, box["top"] + 150
    at = page.value(f"timeline.chart.scale.time({600})")
    page.pointer("mouseWheel", x, y, deltaX=0, deltaY=-200)
    assert long() < 0.8 * whole
    assert page.value("timeline.chart.scale.time(600)") == pytest.approx(at), "it zooms about the pointer"
    first, last = shown()
    for what, to in (("mousePressed", x), ("mouseMoved", x + 100), ("mouseReleased", x + 100)):
        page.pointer(what, to, y, button="left", buttons=1, clickCount=1)
    assert shown()[0] < first and long() == pytest.approx(last - first)
    narrow = long()
    for key, factor in (("+", 0.5), ("-", 1), ("w", 0.5), ("s", 1)):
        page("Input.dispatchKeyEvent", type="keyDown", key=key, text=key)
        assert long() == pytest.approx(narrow * factor)
    before = shown()[0]
    page("Input.dispatchKeyEvent", type="keyDown", key="ArrowRight")
    assert shown()[0] > before
    page.value("document.getElementById('nearer').click()")
    assert long() == pytest.approx(narrow / 2)
    page.value("document.getElementById('fit').click()")
    assert long() == pytest.approx(whole)
    # Along the axis a drag chooses what is shown.
    for what, to in (("mousePressed", 400), ("mouseMoved", 500), ("mouseReleased", 700)):
        page.pointer(what, box["left"] + to, box["top"] + 10, button="left", buttons=1, clickCount=1)
    assert long() == pytest.approx(300 / (page.value("timeline.chart.scale.right") - 96) * whole, rel=1e-3)
    assert page.complaints() == []


@in_a_browser
def test_pointing_tells_what_lies_there(opened: Open):
    page = opened(of_run(made(Costs.of(1.5, 1.25, 0.75, 0.5))))

    def told(view: int, letters: str) -> str:
        cell = page.value(
            f"(() => {{ const view = timeline.chart.views[{view}];"
            f"const i = Array.from(view.kind, (_, i) => name(view, i)).indexOf('{letters}');"
            "const cell = timeline.chart.cell(view, i); const box = timeline.chart.canvas.getBoundingClientRect();"
            "return [box.left + (cell.from + cell.until) / 2, box.top + cell.top + cell.height / 2]; })()"
        )
        page.pointer("mouseMoved", *cell)
        return page.value("document.getElementById('tip').textContent")

    text = told(1, "4F0")
    assert "4F0 forward" in text and "measured: stage 4 on rank 3, chunk 1, microbatch 0" in text
    assert "planned: at" in text, "the same pass in the other view"
    text = told(1, "1F0")
    assert "waited" in text and "warm-up" in text and "for 0F0 of rank 0" in text
    assert "rank 1 holds" in text


@in_a_browser
def test_dark_paper_and_rows_by_rank(opened: Open):
    page = opened(of_run(made(Costs())))
    colour = "timeline.chart.canvas.getContext('2d').getImageData(2, 40, 1, 1).data[0]"
    try:
        light = page.value(colour)
        page("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
        assert page.value(f"timeline.show(0, 1e9), {colour}") < 60 < 200 < light
        page("Emulation.setEmulatedMedia", media="print", features=[])
        frames = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
        assert page.value(f"{frames}.then(() => timeline.chart.printing)") == 1
        assert page.value("timeline.last.rows") == 8, "all of it, whatever fits the screen"
    finally:
        page("Emulation.setEmulatedMedia", media="", features=[])
    page.value("document.getElementById('group').click()")
    rows = page.value("timeline.chart.rows.map((row) => [row.rank, row.label])")
    assert rows[:3] == [[0, "planned"], [0, "measured"], [1, "planned"]]


@in_a_browser
def test_cells_of_one_length_are_labelled_alike_and_no_label_leaves_its_cell(opened: Open):
    """Whether a microbatch's number has one digit or two: 32 microbatches of W, in a cell for `12` or too narrow."""
    page = opened(of_plans([timeline("v-half", 4, 32, "1,1,1,0")], "", ""))
    page.value(
        "window.said = [], CanvasRenderingContext2D.prototype.fillText = function (text) {"
        " if (this.textAlign === 'center') said.push([text, this.measureText(text).width]) }"
    )
    forms = []
    for part in (0.7, 0.5, 0.3, 0.25, 0.2, 0.1):
        page.value(f"said.length = 0, timeline.show(0.2 * page.until, (0.2 + {part}) * page.until)")
        left, right, start, until = page.value(
            "(({left, right, from, until}) => [left, right, from, until])(timeline.chart.scale)"
        )
        cell = (right - left) / (until - start)  # of one unit of time, as F, I and W take
        said = [(text, wide) for text, wide in page.value("said") if re.fullmatch(r"[FIW]\d*|\d+", text)]
        axis = {f"{time}" for time in range(200)}
        narrow = [(text, wide) for text, wide in said if text not in axis]
        assert all(wide <= cell for _, wide in narrow)
        forms.append({re.sub(r"\d+", "0", text)[1:] for text, _ in narrow})
    assert all(len(form) <= 1 for form in forms), "either letters alone or letters with numbers"
    assert {"0"} in forms


def split_everywhere(line: Timeline) -> Timeline:
    """Each backward in its two parts, the weight gradient right after the input gradient."""
    parts = {Kind.B: (Kind.I, Kind.W)}
    rows = tuple(
        tuple(Pass(stage, part, m) for stage, kind, m in row for part in parts.get(kind, (kind,)))
        for row in line.schedule.order
    )
    return simulate(replace(line.schedule, order=rows), line.costs)


@pytest.mark.nightly
@in_a_browser
def test_two_hundred_thousand_passes_stay_responsive(opened: Open):
    line = split_everywhere(timeline("interleaved-1f1b", 64, 512, chunks=2))
    page = opened(of_plans([line], "", ""))
    assert page.complaints() == []
    assert page.value("timeline.passes[0]") == 64 * 512 * 2 * 3
    last = page.value("timeline.last")
    assert last["rows"] * 512 * 2 * 3 == last["merged"], "what cannot be seen is not touched"
    for part in (1, 0.3, 0.1, 0.03, 0.005):
        times = page.value(
            f"Array.from({{length: 20}}, (_, i) => timeline.show(0.4 * page.until, (0.4 + {part}) * page.until).ms)"
        )
        # The best of them: a busy machine lets the wall clock say anything.
        assert min(times) < 50, f"redrawn with {part} of it in sight: {times}"


@in_a_browser
def test_a_plan_has_bytes_too_where_a_model_says_what_a_microbatch_takes(opened: Open):
    page = opened(of_plans([timeline("v-half", 4, 8)], "", "", 0.5 * 2**30))
    assert "3 microbatches (1.50 GiB)" in page.value("document.getElementById('cards').textContent")
    assert page.value("amount(3, timeline.chart.views[0])") == "3 microbatches (1.5 GiB)"
    assert page.value("amount(3, {unit: 'microbatches', one: 0})") == "3 microbatches"


def test_a_record_without_counted_bytes_shows_microbatches():
    recorded = replace(made(Costs()), held=())
    assert isinstance(recorded, Recorded)
    page = drawn(of_run(recorded), "html")
    contents = json.loads(re.search(r'<script id="contents"[^>]*>(.*?)</script>', page, re.S)[1])  # type: ignore[index]
    assert [view["unit"] for view in contents["views"]] == ["microbatches", "microbatches"]
    assert "3 microbatches" in page
