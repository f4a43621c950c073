"""The page of the paper's comparisons: claims are read off the rows, whichever way they go."""

from __future__ import annotations

from typing import Any

import pytest

from tools.benchmarks import tables


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


def page(v_zb: float = 0.6, v_half: float = 2.5, best: float = 0.7) -> str:
    equal = [EQUAL[0], row("V-ZB", v_zb, 5.0), row("V-Half", 0.54, v_half), EQUAL[3]]
    return tables.section([*equal, grid("1F1B", 0.6), grid("V-ZB", None), grid("V-Half", best)])


@pytest.mark.parametrize(("mfu", "verdict"), [(0.6, "holds"), (0.52, "does not hold")])
def test_throughput_is_compared_with_1f1b_at_the_same_size(mfu: float, verdict: str):
    line = next(line for line in page(v_zb=mfu).splitlines() if line.startswith("- V-ZB's throughput"))
    assert f"{100 * (mfu / 0.5 - 1):+.1f} %" in line
    assert line.endswith(f": {verdict}.")


@pytest.mark.parametrize(("held", "verdict"), [(2.5, "holds"), (3.0, "comes near"), (4.0, "does not hold")])
def test_memory_is_compared_with_the_papers_share(held: float, verdict: str):
    line = next(line for line in page(v_half=held).splitlines() if line.startswith("- V-Half's activation memory"))
    assert line.endswith(f": {verdict}.")


def test_a_grid_search_names_the_best_of_ours_and_what_does_not_fit():
    text = page(best=0.66)
    assert "V-Half +10.0 % above the best of 1F1B with and without recompute (1F1B)" in text
    assert "| V-ZB | does not fit |" in text


def test_a_grid_search_tells_what_recompute_and_offload_add():
    rows = [grid("1F1B", 0.6), grid("V-Half", 0.63), grid("adaptive with recompute", None)]
    assert "without either" not in tables.section([*EQUAL, *rows])
    text = tables.section([*EQUAL, *rows, grid("adaptive with both", 0.693)])
    assert "Adaptive with both: 69.3 % MFU, +10.0 % against the best of ours without either." in text
    assert "V-Half +5.0 % above the best of 1F1B" in text
    line = next(line for line in text.splitlines() if line.startswith("| adaptive with both |"))
    assert line.endswith("| 12.5 % | 300 |")
    tall = [line.count("|") for line in text.splitlines() if line.startswith(("| V-Half | 63", "| adaptive with"))]
    assert len(set(tall)) == 1


def test_the_drawing_is_the_same_whenever_it_is_made():
    rows = [row(method, 0.4 + n / 1000, held, n) for method, held in (("1F1B", 5.0), ("V-Half", 2.5)) for n in (32, 64)]
    drawn = tables.drawing(rows)
    assert drawn == tables.drawing(rows)
    assert drawn.count("<svg") == 1
