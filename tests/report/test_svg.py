"""The SVG drawing."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from benchmarks.uneven_layers import uneven
from megatron.schedules.report.svg import draw_svg
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.decisions import Decisions
from megatron.schedules.schedule.kinds import KINDS, Kind, Resource
from megatron.schedules.schedule.simulator import simulate
from tests.report.fonts import measured
from tests.report.made import saved, timeline
from tests.tiers import by_night

SVG = "{http://www.w3.org/2000/svg}"
CELL = re.compile(r"M([\d.]+) ([\d.]+)h([\d.]+)v([\d.]+)h-([\d.]+)z")


def cells(root: ElementTree.Element) -> list[tuple[float, ...]]:
    """Left, top, width and height of every pass drawn."""
    paths = [path.get("d", "") for path in root.iter(f"{SVG}path") if "cell" in path.get("class", "")]
    return [tuple(map(float, match.groups()[:4])) for path in paths for match in CELL.finditer(path)]


def words(root: ElementTree.Element) -> str:
    return " | ".join("".join(text.itertext()) for text in root.iter(f"{SVG}text"))


@pytest.mark.parametrize(
    ("name", "d", "n", "costs"),
    [
        ("1f1b", 4, 8, "1,1,1,0"),
        ("v-half", 4, 8, "1,1.1,0.75,0.05"),
        ("interleaved-1f1b", 2, 1, "1,1,1,0"),
        by_night("v-min", 32, 40, "1,2,3,0.5"),
    ],
)
def test_every_pass_is_drawn_once_and_where_it_runs(name, d, n, costs):
    line = timeline(name, d, n, costs)
    root = ElementTree.fromstring(draw_svg([line]))
    width, height = (float(x) for x in root.get("viewBox", "").split()[2:])
    drawn = cells(root)
    assert len(drawn) == sum(map(len, line.schedule.order))
    tops = sorted({top for _, top, _, _ in drawn})
    assert len(tops) == d
    scale = (width - 66 - 18) / line.makespan
    for rank, top in enumerate(tops):
        row = sorted((left, wide) for left, y, wide, _ in drawn if y == top)
        for (left, wide), start, end in zip(row, line.start[rank], line.end[rank], strict=True):
            assert left == pytest.approx(66 + start * scale, abs=0.011)
            assert wide == pytest.approx((end - start) * scale, abs=0.011)
    assert all(left + wide <= width and top + tall <= height for left, top, wide, tall in drawn)


def test_numbers_where_they_fit():
    line = timeline("v-half", 4, 8)
    root = ElementTree.fromstring(draw_svg([line]))
    numbers = [text.text for group in root.iter(f"{SVG}g") for text in group]
    assert sorted(numbers) == sorted(str(work.microbatch) for _, work in line.schedule.passes())
    crowded = ElementTree.fromstring(draw_svg([timeline("v-half", 4, 200)]))
    assert not [text for group in crowded.iter(f"{SVG}g") for text in group]


def numbered(root: ElementTree.Element) -> dict[tuple[float, float], tuple[str, float]]:
    """By where its middle lies, each number on a cell, and its size."""
    return {
        (float(text.get("x", "")), float(text.get("y", "")) - 0.36 * float(group.get("font-size", ""))): (
            text.text or "",
            float(group.get("font-size", "")),
        )
        for group in root.iter(f"{SVG}g")
        for text in group
    }


@pytest.mark.parametrize(
    ("name", "d", "n", "costs"),
    [
        *(("1f1b", d, n, "1,1,1,0") for d, n in ((4, 8), (4, 32), (8, 32), (2, 100), (16, 64))),
        *(("v-half", d, n, "1,1.1,0.75,0.05") for d, n in ((4, 8), (4, 12), (2, 24), (8, 32), (16, 64))),
        ("zb-1p", 4, 32, "1,2,1,0"),
    ],
)
def test_numbers_fit_their_cells_and_a_row_has_all_of_a_kind_or_none(name, d, n, costs):
    """Whatever the number: where 12 does not fit, neither 9 nor 12 is there."""
    line = timeline(name, d, n, costs)
    text = draw_svg([line])
    root = ElementTree.fromstring(text)
    labels, rows = numbered(root), {}
    for path in root.iter(f"{SVG}path"):
        for match in CELL.finditer(path.get("d", "") if "cell" in path.get("class", "") else ""):
            left, top, wide, tall, _ = map(float, match.groups())
            at = min(labels, key=lambda at: abs(at[0] - left - wide / 2) + abs(at[1] - top - tall / 2), default=(0, 0))
            has = labels.get(at) if abs(at[0] - left - wide / 2) + abs(at[1] - top - tall / 2) < 0.1 else None
            rows.setdefault((top, path.get("class")), set()).add(has is not None)
            if has is not None:
                assert 6 <= has[1] <= 11 and measured(has[0], has[1]) < wide - 0.8, "a cell's border is free"
    assert all(len(each) == 1 for each in rows.values())
    assert ("Numbers in cells are microbatches." in text) == bool(labels)


def test_the_wide_cells_of_32_microbatches_are_numbered():
    line = timeline("1f1b", 8, 32)
    found = sorted(int(number) for number, _ in numbered(ElementTree.fromstring(draw_svg([line]))).values())
    assert found == sorted(8 * list(range(32))), "each backward, and no forward"


def test_headings_have_bubble_and_memory():
    base, half = timeline("1f1b", 4, 8), timeline("v-half", 4, 8)
    said = words(ElementTree.fromstring(draw_svg([base, half], "a <caption> & more")))
    assert f"1F1Bbubble{100 * base.bubble:.1f} %activation memory4 microbatches |" in said
    assert f"V-Halfbubble{100 * half.bubble:.1f} %activation memory3 microbatches (75.0 % of 1F1B's)" in said
    assert "a <caption> & more" in said
    assert said.count("1F1B holds 4") == 2


def test_memory_is_in_gib_too_where_a_model_says_what_a_microbatch_takes():
    half = timeline("v-half", 4, 8)
    said = words(ElementTree.fromstring(draw_svg([half, timeline("1f1b", 4, 8)], microbatch_bytes=0.5 * 2**30)))
    assert "activation memory3 microbatches (1.50 GiB, 75.0 % of 1F1B's) |" in said
    assert "activation memory4 microbatches (2.00 GiB) |" in said
    assert "1F1B holds 4 microbatches" in said


def test_a_heading_keeps_to_the_page():
    line = saved(8, 32)
    line = replace(line, schedule=replace(line.schedule, name="interleaved-1f1b"))
    for microbatch_bytes in (0.0, 11.123 * 2**30):
        root = ElementTree.fromstring(draw_svg([line], microbatch_bytes=microbatch_bytes))
        heads = [text for text in root.iter(f"{SVG}text") if text.get("class") == "head"]
        for head in heads:
            wide = 18.0
            for part in head:
                bold, size = part.get("class") != "faint", 16 if part.get("class") == "name" else 13
                wide += float(part.get("dx", "0")) + measured(part.text or "", size, bold=bold)
            assert wide <= 960 - 12
        assert sum("copying" in "".join(head.itertext()) for head in heads) == 1


def test_1f1b_above_its_own_memory_is_explained_below():
    even = timeline("1f1b", 4, 8)
    more = simulate(even.schedule, uneven(Costs(), (1,) * 4, (1.3, 0.9, 0.9, 0.9)).on(even.schedule.placement))
    reason = "under 1F1B too."
    assert reason in words(ElementTree.fromstring(draw_svg([more], "a caption.")))
    assert reason not in words(ElementTree.fromstring(draw_svg([even], "a caption.")))


def test_the_memory_curve_reaches_the_planned_peak():
    half = timeline("v-half", 4, 8)
    root = ElementTree.fromstring(draw_svg([half]))
    area = next(path.get("d", "") for path in root.iter(f"{SVG}path") if path.get("class") == "area")
    floor = float(re.match(r"M[\d.]+ ([\d.]+)", area)[1])
    levels = [float(level) for level in re.findall(r"V([\d.]+)", area)]
    limit = next(path.get("d", "") for path in root.iter(f"{SVG}path") if path.get("class") == "limit")
    reference = float(re.match(r"M[\d.]+ ([\d.]+)", limit)[1])
    assert (floor - min(levels)) / (floor - reference) == pytest.approx(0.75, abs=0.01)


def test_schedules_share_the_time_scale():
    root = ElementTree.fromstring(draw_svg([timeline("1f1b", 4, 8), timeline("v-half", 4, 8)]))
    lanes = [float(rect.get("width")) for rect in root.iter(f"{SVG}rect") if rect.get("class") == "lane"]
    assert lanes[0] / lanes[-1] == pytest.approx(66 / timeline("v-half", 4, 8).makespan, abs=0.001)


def test_self_contained_in_light_and_dark():
    text = draw_svg([timeline("v-zb", 4, 8)])
    assert not re.search(r"href|url\(|@import|<script|<image", text)
    assert text.count("http") == 1  # the namespace
    assert "@media (prefers-color-scheme:dark)" in text
    # Its own background: the page around it may be of either kind.
    assert '<rect class="page"' in text
    assert 'role="img"' in text


@pytest.mark.parametrize("one_way", [False, True])
def test_copies_stand_in_lanes_of_their_own(one_way):
    line = saved(one_way=one_way)
    root = ElementTree.fromstring(draw_svg([line]))
    lanes: dict[float, list[tuple[float, float]]] = {}
    for left, top, wide, _ in cells(root):
        lanes.setdefault(top, []).append((left, wide))
    scale = (960 - 66 - 18) / line.makespan
    drawn = iter(sorted(lanes.items()))
    for rank, row in enumerate(line.schedule.order):
        spans = zip(row, line.start[rank], line.end[rank], strict=True)
        expected = [[span for span in spans if KINDS[span[0].kind].resource is Resource.COMPUTE]]
        directions = [(Kind.O, Kind.L)] if one_way else [(Kind.O,), (Kind.L,)]
        expected += [[copy for copy in line.copies[rank] if copy.work.kind in kinds] for kinds in directions]
        for lane in expected:
            _, found = next(drawn)
            want = [(66 + start * scale, (end - start) * scale) for _, start, end in lane]
            assert [x for cell in sorted(found) for x in cell] == pytest.approx([x for w in want for x in w], abs=0.011)
            for (left, wide), (following, _) in pairwise(sorted(found)):
                assert left + wide <= following + 0.02, "one thing at a time in a lane"
    assert next(drawn, None) is None
    tall = {top: height for _, top, _, height in cells(root)}
    tops = sorted(tall)
    assert all(top + tall[top] <= below for top, below in pairwise(tops)), "no lane covers another"
    said = words(root)
    assert f"copying{100 * line.copying:.1f} %" in said
    assert f"recomputed{100 * line.recomputed:.1f} % | " not in said
    assert f"recomputed{100 * line.recomputed:.1f} %useful{100 * line.useful:.1f} %" in said
    assert all(KINDS[kind].meaning in said for kind in (Kind.R, Kind.O, Kind.L))


def test_what_takes_no_time_has_no_cell():
    schedule = timeline("v-half", 4, 8).schedule
    line = simulate(schedule, uneven(Costs(), (1, 0, 1, 1, 1, 1, 1, 1)).on(schedule.placement))
    drawn = cells(ElementTree.fromstring(draw_svg([line])))
    assert len(drawn) == sum(work.stage != 1 for _, work in schedule.passes())
    assert all(wide > 0 and tall > 0 for _, _, wide, tall in drawn)
    decisions = Decisions(recomputed=(1.0,) * 8, offloaded=(1.0,) * 8)
    instant = draw_svg([simulate(saved().schedule, Costs().on(schedule.placement, decisions))])
    assert not re.search(r"h-?0v|h0z|NaN", instant)
