"""The page of the paper's comparisons: claims are read off the rows, whichever way they go."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import tables
from benchmarks.parts import Claim


def row(method: str, mfu: float, activations: float, microbatches: int = 32) -> dict[str, Any]:
    return {
        "kind": "equal",
        "model": "9.6B",
        "method": method,
        "pipeline": 16,
        "microbatches": microbatches,
        "mfu": mfu,
        "bubble": 0.1,
        "memory_gib": 20.0,
        "activations_gib": activations,
    }


def grid(method: str, mfu: float | None) -> dict[str, Any]:
    sizes = {"data": 1, "tensor": 8, "pipeline": 5, "micro_batch_size": 1, "microbatches": 160}
    found = {"mfu": mfu, "bubble": 0.1, "memory_gib": 70.0, "recomputed": 0.125, "host_gib": 300.0}
    return {"kind": "grid", "sequence_length": 1024, "method": method} | sizes | found


EQUAL = [row("1F1B", 0.5, 5.0), row("V-ZB", 0.6, 5.0), row("V-Half", 0.54, 2.5), row("V-Min", 0.45, 1.7)]


def rows(v_zb: float = 0.6, v_half: float = 2.5, best: float = 0.7) -> list[dict[str, Any]]:
    equal = [EQUAL[0], row("V-ZB", v_zb, 5.0), row("V-Half", 0.54, v_half), EQUAL[3]]
    return [*equal, grid("1F1B", 0.6), grid("V-ZB", None), grid("V-Half", best)]


def claim(found: list[dict[str, Any]], begins: str) -> Claim:
    return next(claim for claim in tables.claims(found) if claim.text.startswith(begins))


@pytest.mark.parametrize(("mfu", "verdict"), [(0.6, "held"), (0.52, "not held")])
def test_throughput_is_compared_with_1f1b_at_the_same_size(mfu: float, verdict: str):
    found = claim(rows(v_zb=mfu), "V-ZB is 7 % to 55 % faster")
    assert f"{100 * (mfu / 0.5 - 1):+.1f} %" in found.found
    assert found.verdict == verdict


@pytest.mark.parametrize(("held", "verdict"), [(2.5, "held"), (3.0, "nearly"), (4.0, "not held")])
def test_memory_is_compared_with_the_papers_share(held: float, verdict: str):
    assert claim(rows(v_half=held), "V-Half needs 0.500 of 1F1B's activations").verdict == verdict


@pytest.mark.parametrize(("best", "gain", "verdict"), [(0.66, "+10.0 %", "not held"), (0.7, "+16.7 %", "held")])
def test_a_grid_search_names_the_best_of_ours_and_what_does_not_fit(best: float, gain: str, verdict: str):
    found = claim(rows(best=best), "The best of ours is 16 % faster than the best 1F1B")
    assert (found.found, found.verdict) == (f"V-Half {gain} above 1F1B", verdict)
    assert "| V-ZB | does not fit |" in tables.section(rows(best=best))


def test_a_grid_search_tells_what_recompute_and_offload_add():
    found = [*EQUAL, grid("1F1B", 0.6), grid("V-Half", 0.63), grid("adaptive with recompute", None)]
    assert "without either" not in tables.section(found)
    found.append(grid("adaptive with both", 0.693))
    text = tables.section(found)
    assert "adaptive with both reaches 69.3 % MFU, +10.0 % above the best of ours without either." in text
    assert claim(found, "The best of ours").found == "V-Half +5.0 % above 1F1B"
    line = next(line for line in text.splitlines() if line.startswith("| adaptive with both |"))
    assert line.endswith("| 69.3 % (1/8/5, 12.5 % recomputed, 300 GiB on a host) |")
    tall = [line.count("|") for line in text.splitlines() if line.startswith(("| V-Half | 63", "| adaptive with"))]
    assert len(set(tall)) == 1


def test_the_drawing_is_the_same_whenever_it_is_made():
    points = [
        row(method, 0.4 + n / 1000, held, n) for method, held in (("1F1B", 5.0), ("V-Half", 2.5)) for n in (32, 64)
    ]
    drawn = tables.drawing(points)
    assert drawn == tables.drawing(points)
    assert drawn.count("<svg") == 1
