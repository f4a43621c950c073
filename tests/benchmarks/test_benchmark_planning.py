"""benchmarks/planning.py: what is measured, what is kept of it, and what is made of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import planning as benchmark_planning
from benchmarks import planning_table as table
from benchmarks.planning_cells import Cell, Result, drawn, measure
from megatron.schedules.planner.adaptive import least_limit
from megatron.schedules.search.frontier import ladder

PEERS = json.loads((Path(benchmark_planning.__file__).parent / "peers.json").read_text())
COSTS = {"A": [1, 1, 1, 0], "C": [1, 1.1, 0.75, 0.05]}


def rung(limit: float, bubble: float) -> Result:
    return {"limit": limit, "peak": limit, "bubble": bubble, "bubble_bound": 0.01, "makespan": 1.0, "chunks": 4}


def peers(*rows: tuple[str, str, float, float]) -> table.Peers:
    """Rows (project, costs, peak, bubble) at d=4, n=8 against rungs of 0.3 at 2 and 0.1 at 4 microbatches."""
    made = [
        {"peer": peer, "schedule": "theirs", "d": 4, "n": 8, "costs": costs, "peak": peak, "bubble": bubble}
        for peer, costs, peak, bubble in rows
    ]
    cells = {(4, 8, name): Cell("frontier", 4, 8, name, 8.0) for name in COSTS}
    return table.Peers({"costs": COSTS, "rows": made}, cells, lambda cell: {"rungs": [rung(2, 0.3), rung(4, 0.1)]})


def test_every_row_of_the_data_has_its_cell():
    cells = benchmark_planning.cells_of(PEERS, quick=False)
    for row in PEERS["rows"]:
        assert cells.peers[row["d"], row["n"], row["costs"]].up_to >= row["peak"]
    assert len({str(cell) for cell in cells.untimed()}) == len(cells.untimed())
    quick = benchmark_planning.cells_of(PEERS, quick=True)
    assert set(quick.untimed()) < set(cells.untimed())


def test_a_row_is_met_within_its_memory_and_its_four_digits():
    found = peers(("one", "C", 2, 0.3), ("two", "C", 3.9, 0.29), ("three", "A", 4, 0.09996), ("four", "A", 4, 0.0999))
    assert [(row["peer"], ours["limit"]) for row, ours in found.unmet()] == [("two", 2), ("three", 4), ("four", 4)]
    assert "**1 of 4 rows met**" in found.section()
    assert "two | theirs" in found.section()


def test_low_memory_is_compared_with_the_best_within_it():
    said = peers(("one", "C", 2, 0.6), ("two", "C", 2, 0.4), ("big", "C", 4, 0.1), ("unit", "A", 2, 0.9)).low_memory()
    assert "**25.0 % smaller on average** over 1 memory" in said
    assert "two | theirs" in said
    assert "big" not in said and "unit" not in said


def test_results_are_kept_by_the_code_that_found_them(tmp_path):
    path = tmp_path / "kept" / "results.jsonl"
    cell, other = Cell("random", seed=1), Cell("random", seed=2)
    benchmark_planning.Kept(path).keep(cell, {"seconds": 1.0})
    old = {"version": "another", "cell": str(other), "result": {}}
    path.write_text(path.read_text() + json.dumps(old) + '\n{"version": "cut sh')
    again = benchmark_planning.Kept(path)
    assert again.find(cell) == {"seconds": 1.0}
    assert again.find(other) is None
    again.keep(other, {"seconds": 2.0})
    assert benchmark_planning.Kept(path).find(other) == {"seconds": 2.0}


def test_measured_cells_make_tables():
    costs = "20,20,20,0"
    cell = Cell("frontier", 4, 8, costs, 4.0, seconds=0.05)
    found = measure(cell)
    assert [each["limit"] for each in found["rungs"]] == sorted({each["limit"] for each in found["rungs"]})
    assert all(each["peak"] <= each["limit"] for each in found["rungs"])
    assert all(each["bubble"] >= each["bubble_bound"] for each in found["rungs"])
    assert found["rungs"][-1]["makespan"] <= 1020  # in the unit of the costs
    assert f"| `{costs}` | 4 | 1020 | proved |" in table.optima({costs: cell}, lambda cell: found)
    assert "| 4 | 100.0 % |" in table.curve({5.0: found}, 4.0)


@pytest.mark.parametrize("seed", range(20))
def test_random_problems_are_sound_and_reproducible(seed):
    request = drawn(seed)
    assert request == drawn(seed)
    assert request.memory_limit >= least_limit(request)
    assert len(request.costs.model.layers) == 4 * request.ranks


def test_lots_count_what_goes_wrong():
    fine = {"makespan": 9.0, "named": 10.0, "within": True, "bound": 8.0}
    said = table.lots([fine, {**fine, "within": False}, {**fine, "makespan": 11.0}, {**fine, "named": None}])
    assert "Over the memory limit: **1**" in said
    assert "**1** of the 3 where one fits" in said


def test_memory_saving_has_a_cell_for_each_limit_and_a_row_in_the_table():
    saved = benchmark_planning.cells_of(PEERS, quick=True).saved
    assert list(saved) == ["recompute", "offload, 0.5", "both, 0.5"]
    limits = [[cell.up_to for cell in cells] for cells in saved.values()]
    assert limits[0] == limits[1] == limits[2] and limits[0][0] == 0.125
    assert saved["offload, 0.5"][0].copy == pytest.approx((1 + 1.1 + 0.75) / 2)
    small = {
        heading: [Cell("memory_saving", 2, 6, "1,1.1,0.75,0.05", 0.5, 0.1, recompute=not copy, copy=copy)]
        for heading, copy in (("recompute", 0.0), ("offload", 0.7))
    }
    results = {str(cell): measure(cell) for cells in small.values() for cell in cells}
    assert all(found["within"] and found["peak"] <= 1 + 1e-9 for found in results.values())
    recompute, offload = results.values()
    assert recompute["copying"] == 0 == offload["recomputed"]
    assert recompute["useful"] * recompute["makespan"] == pytest.approx(6 * 2 * 2.85), (
        "the same work, whatever is recomputed"
    )
    assert offload["useful"] == pytest.approx(1 - offload["bubble"])
    alone = {4.0: {"rungs": [rung(1, 0.3)], "named": []}}
    said = table.saved(small, alone, lambda cell: results[str(cell)])
    assert "| memory | of 1F1B's | without | recompute | offload |" in said
    assert f"| 1 | 50.0 % | 30.00 % | {100 * (1 - recompute['useful']):.2f} % " in said


def test_the_drawing_has_curves_of_memory_saving(tmp_path):
    cells = benchmark_planning.cells_of(PEERS, quick=True)
    kept = benchmark_planning.Kept(tmp_path / "kept.jsonl")
    for heading, useful in (("recompute", 0.7), ("offload, 0.5", 0.9)):
        for cell in cells.saved[heading]:
            kept.keep(cell, {"useful": useful})
    frontier = {"rungs": [rung(4, 0.2), rung(8, 0.05)], "named": []}
    made = table.Peers(PEERS, cells.peers, lambda cell: {"rungs": [], "named": []})
    curves = benchmark_planning._curves(cells.saved, kept)
    drawn_with = benchmark_planning.drawing(frontier, curves, made)
    assert drawn_with.count('class="again"') == drawn_with.count('class="offload"') == 2, "a curve, and its legend"
    assert "with recompute" in drawn_with
    assert "with recompute or offload, plans without count too." in drawn_with
    without = benchmark_planning.drawing(frontier, {}, made)
    assert "with recompute" not in without and 'class="again"' not in without


def test_curves_of_memory_saving_are_measured_at_every_limit_of_the_curve_without():
    cells = benchmark_planning.cells_of(PEERS, quick=False)
    for row in cells.saved.values():
        ranks, n = row[0].ranks, row[0].microbatches
        without = [limit for limit in ladder(ranks, n, [1.0], []) if limit <= ranks]
        assert [cell.up_to * ranks for cell in row] == without
