"""The drawing of the frontier."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from megatron.schedules.report.frontier_svg import Mark, Point, Shortest, draw_frontier

SVG = "{http://www.w3.org/2000/svg}"
CURVE = [Point(1, 0.7, 0.6), Point(2, 0.28, 0.1), Point(4, 0.07, 0.02), Point(20, 0.01, 0.0)]
LEFT, RIGHT, TOP, FLOOR = 58, 936, 56, 482


def drawn(marks: list[Mark]) -> ElementTree.Element:
    return ElementTree.fromstring(draw_frontier(CURVE, marks, "a <heading>", "a & b", (10.0, 0.3)))


def words(root: ElementTree.Element) -> list[str]:
    return ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]


def x(memory: float) -> float:
    return LEFT + memory / 10 * (RIGHT - LEFT)


def y(bubble: float) -> float:
    return FLOOR - bubble / 0.3 * (FLOOR - TOP)


def path(root: ElementTree.Element, look: str) -> list[float]:
    first = next(path.get("d", "") for path in root.iter(f"{SVG}path") if path.get("class") == look)
    return [float(number) for number in re.findall(r"[\d.]+", first)]


def test_the_curve_is_steps_within_the_plane():
    expected = [x(2), TOP, y(0.28), x(4), y(0.07), RIGHT]  # the first limit lies above, the last one beyond
    assert path(drawn([]), "curve") == pytest.approx(expected, abs=0.06)
    assert path(drawn([]), "bound") == pytest.approx([x(2), y(0.1), x(4), y(0.02)], abs=0.06)


def test_no_curve_is_above_one_of_fewer_means_or_of_a_smaller_limit():
    """Whatever was found: a plan within less memory, or without recompute, is within the limit too."""
    curve = [Point(2, 0.2, 0.1), Point(3, 0.22, 0.1), Point(4, 0.1, 0.02), Point(5, 0.05, 0.02)]
    again = [Shortest(2, 0.15), Shortest(4, 0.12), Shortest(6, 0.06)]
    text = draw_frontier(curve, [], "", "", (10.0, 0.3), {"again": again})
    root = ElementTree.fromstring(text)
    plain = [x(2), TOP, y(0.2), x(3), y(0.2), x(4), y(0.1), x(5), y(0.05), RIGHT]
    assert path(root, "curve") == pytest.approx(plain, abs=0.06)
    better = [x(2), TOP, y(0.15), x(3), y(0.15), x(4), y(0.1), x(5), y(0.05), x(6), y(0.05), RIGHT]
    assert path(root, "again") == pytest.approx(better, abs=0.06)


def test_every_schedule_in_the_plane_has_its_point():
    marks = [Mark("V-Half", "", 5, 0.1), Mark("other", "them", 6, 0.2), Mark("far", "them", 11, 0.2)]
    root = drawn([*marks, Mark("high", "", 5, 0.4)])
    circles = list(root.iter(f"{SVG}circle"))[:-1]  # the last is the legend's
    assert [(float(c.get("cx", "")), float(c.get("cy", ""))) for c in circles] == [
        pytest.approx((x(5), y(0.1)), abs=0.06)
    ]
    assert path(root, "other")[:2] == pytest.approx([x(6), y(0.2)], abs=0.06)
    said = words(root)
    assert "V-Half" in said
    assert "other (them)" in said
    assert not [word for word in said if "far" in word or "high" in word]


def test_points_on_one_another_share_a_label():
    same = [Mark("V-ZB", "", 8, 0.05), Mark("zbv-formatted", "them", 8, 0.0501), Mark("ZBV", "those", 8, 0.05)]
    assert "ZBV (ours, those, them)" in words(drawn(same))


def test_labels_keep_apart():
    marks = [Mark(f"schedule {k}", "them", 6, 0.1 + k * 0.005) for k in range(8)]
    labels = [text for text in drawn(marks).iter(f"{SVG}text") if text.get("class") == "theirs"]
    boxes = [(float(t.get("x", "")), float(t.get("y", "")), 6.16 * len(t.text or "")) for t in labels]
    assert len(boxes) == 8
    for k, (left, top, width) in enumerate(boxes):
        assert left >= LEFT and left + width <= RIGHT + 24
        assert all(
            abs(top - low) >= 12.9 or left + width < right or right + wide < left for right, low, wide in boxes[:k]
        )


def test_self_contained_in_light_and_dark():
    text = draw_frontier(CURVE, [Mark("<V>", "", 5, 0.1)], "a <heading>", "a & b", (10.0, 0.3))
    assert not re.search(r"href|url\(|@import|<script|<image", text)
    assert "@media (prefers-color-scheme:dark)" in text
    assert '<rect class="page"' in text
    assert {"a <heading>", "a & b", "<V>"} <= set(words(ElementTree.fromstring(text)))
