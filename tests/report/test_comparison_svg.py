"""The drawing of a comparison."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from xml.etree import ElementTree

import pytest

from megatron.schedules.planner.registry import Request, every_named
from megatron.schedules.report.figures import figures
from megatron.schedules.report.frontier_svg import Box, draw_comparison
from megatron.schedules.report.table import Row
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.utils.errors import PlanError
from tests.report.fonts import measured
from tests.report.made import saved, timeline

SVG = "{http://www.w3.org/2000/svg}"
LEFT, RIGHT, TOP, FLOOR = 58, 936, 56, 482


def drawn(rows: list[Row]) -> ElementTree.Element:
    return ElementTree.fromstring(draw_comparison(rows, "a <caption> & more."))


def words(root: ElementTree.Element) -> list[str]:
    return ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]


def apart(boxes: dict[str, Box]) -> bool:
    return all(
        one[2] < other[0] or other[2] < one[0] or one[3] < other[1] or other[3] < one[1]
        for one, other in combinations(boxes.values(), 2)
    )


def labels(root: ElementTree.Element) -> dict[str, Box]:
    """By label, the box that it fills: left, top, right, bottom, as a font has it."""
    return {
        text.text or "": (
            float(text.get("x", "")),
            float(text.get("y", "")) - 8.5,
            float(text.get("x", "")) + measured(text.text or "", 11),
            float(text.get("y", "")) + 2.5,
        )
        for text in root.iter(f"{SVG}text")
        if text.get("class") == "ours"
    }


def rows_of(d: int, n: int, costs: str) -> list[Row]:
    return [Row(line.schedule.name, figures(line)) for line in every_named(Request("1f1b", d, n, Costs.parse(costs)))]


@pytest.mark.parametrize(("d", "n", "costs"), [(4, 8, "1,1,1,0"), (8, 32, "1,1.1,0.75,0.05"), (2, 1, "1,1,1,0")])
def test_every_schedule_is_a_labelled_point_and_no_label_covers_another(d, n, costs):
    rows = rows_of(d, n, costs)
    root = drawn(rows)
    points = [(float(each.get("cx", "")), float(each.get("cy", ""))) for each in root.iter(f"{SVG}circle")]
    memory, bubble = (1.1 * max(each) for each in zip(*((r.result.peak, r.result.bubble) for r in rows), strict=True))
    expected = sorted(
        (LEFT + r.result.peak / memory * (RIGHT - LEFT), FLOOR - r.result.bubble / bubble * (FLOOR - TOP)) for r in rows
    )
    assert [x for point in sorted(points) for x in point] == pytest.approx([x for p in expected for x in p], abs=0.06)
    found = labels(root)
    named = sorted(name for label in found for name in label.split(", "))
    assert [name.lower() for name in named] == sorted(row.name for row in rows)
    assert apart(found)
    for left, top, right, bottom in found.values():
        assert left >= LEFT and right <= 960 and top >= TOP and bottom <= FLOOR


def test_labels_of_near_points_keep_apart():
    base = figures(timeline("1f1b", 4, 8))
    near = [Row(f"schedule-{k}", replace(base, useful=0.7 - 0.004 * k)) for k in range(9)]
    found = labels(drawn([*near, Row("v-min", figures(timeline("v-min", 4, 8)))]))
    assert len(found) == 10
    assert apart(found)


def test_what_has_no_plan_is_said_below():
    said = words(drawn([Row("v-half", figures(timeline("v-half", 4, 8))), Row("interleaved-1f1b", "too few chunks")]))
    assert "a <caption> & more. Without a plan: Interleaved-1F1B." in said
    with pytest.raises(PlanError, match="no schedule can be drawn: too few chunks"):
        drawn([Row("interleaved-1f1b", "too few chunks")])


def test_forwards_done_again_count_as_bubble():
    found, base = figures(saved()), figures(timeline("1f1b", 4, 8))
    assert 1 - found.useful > base.bubble > found.bubble
    root = drawn([Row("file", found), Row("1f1b", base)])
    assert any("Recompute counts as bubble." in each for each in words(root))
    # It has the largest: the plane ends a tenth above it.
    assert min(float(each.get("cy", "")) for each in root.iter(f"{SVG}circle")) == pytest.approx(
        FLOOR - (FLOOR - TOP) / 1.1, abs=0.06
    )


def test_the_axis_says_what_a_microbatch_takes_where_a_model_does():
    line = timeline("v-half", 4, 8)
    axis = "activation memory of the worst rank, microbatches"
    assert axis in words(drawn([Row("v-half", figures(line))]))
    assert f"{axis} of 1.50 GiB" in words(drawn([Row("v-half", figures(line, 1.5 * 2**30))]))


def test_a_comparison_needs_no_legend_and_shows_no_curve():
    said = words(drawn(rows_of(4, 8, "1,1,1,0")))
    assert not {"adaptive", "its lower bound", "ours by name", "other projects"} & set(said)
