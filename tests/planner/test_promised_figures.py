"""What is said of the schedules holds: who idles less than whom, what cannot be beaten, and that costs are heeded."""

from __future__ import annotations

import pytest

from benchmarks.uneven_layers import uneven
from megatron.schedules.planner.registry import Request, plan
from megatron.schedules.schedule.costs import Costs
from tests.planner.made_schedules import NAMED, REAL, UNIT, planned, timed

SEARCHED = ["zb-1p", "zb-2p", "v-min", "v-half", "v-zb"]
SIZES = [(2, 2), (2, 7), (3, 3), (4, 4), (4, 9), (5, 10), (6, 8), (8, 16), (8, 24), (12, 25)]

# Planned for the costs on the left, each idles less than the one below it in the list.
LESS_BUBBLE = [
    ("v-half", "1f1b"),
    ("v-zb", "1f1b"),
    ("zb-1p", "1f1b"),
    ("zb-2p", "1f1b"),
    ("interleaved-1f1b", "1f1b"),
    ("v-zb", "zb-1p"),
]
MORE_MEMORY = [("zb-2p", "zb-1p"), ("v-zb", "v-half"), ("v-half", "v-min")]


@pytest.mark.parametrize("costs", [UNIT, REAL])
@pytest.mark.parametrize(("better", "worse"), LESS_BUBBLE)
def test_the_better_schedule_has_the_smaller_bubble(better: str, worse: str, costs: str):
    for d, n in SIZES:
        assert planned(better, d, n, costs).bubble < planned(worse, d, n, costs).bubble


@pytest.mark.parametrize("costs", [UNIT, REAL])
@pytest.mark.parametrize(("more", "less"), MORE_MEMORY)
def test_more_memory_never_costs_time(more: str, less: str, costs: str):
    for d, n in SIZES:
        assert planned(more, d, n, costs).makespan <= planned(less, d, n, costs).makespan + 1e-9


@pytest.mark.parametrize(("name", "stage_forward"), [("v-zb", 1), ("zb-1p", 2), ("zb-2p", 2)])
def test_at_unit_costs_only_the_first_forwards_way_in_is_idle(name: str, stage_forward: int):
    """The last rank cannot start before d - 1 forwards are done, and computes 6 units a microbatch: none is shorter."""
    for d in (2, 3, 4, 5, 7, 8, 11, 12):
        for n in (d, d + 1, 2 * d + 3):
            assert planned(name, d, n).makespan == pytest.approx(6 * n + (d - 1) * stage_forward)


@pytest.mark.parametrize("costs", [REAL, "20,22,15,1"])
def test_zb_2p_idles_for_the_first_forwards_way_in_alone(costs: str):
    asked = Costs.parse(costs)
    for d in (2, 3, 4, 8, 16):
        way_in = (d - 1) * (2 * asked.layers.forward + asked.link.latency)
        work = 2 * d * 2 * sum(asked.layers.passes)
        assert planned("zb-2p", d, 2 * d, costs).makespan == pytest.approx(work + way_in)


@pytest.mark.parametrize(("d", "n"), [(4, 8), (8, 32)])
def test_eager_1f1b_hides_link_latency_that_1f1b_waits_for(d: int, n: int):
    assert planned("eager-1f1b", d, n).makespan == planned("1f1b", d, n).makespan
    assert planned("eager-1f1b", d, n, "1,1,1,1").makespan < planned("1f1b", d, n, "1,1,1,1").makespan


# --- costs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cost", ["forward", "input_grad", "weight_grad", "latency"])
@pytest.mark.parametrize("name", NAMED)
def test_every_cost_counts(name: str, cost: str):
    """Whichever of the four is doubled, the plan made for it takes longer."""
    costs = {"forward": 1, "input_grad": 1.1, "weight_grad": 0.75, "latency": 0.05}
    assert Costs.of(**costs) == Costs.parse(REAL)
    dearer = Costs.of(**costs | {cost: 2 * costs[cost]})
    assert timed(plan(Request(name, 4, 9, dearer)), dearer).makespan > planned(name, 4, 9, REAL).makespan


@pytest.mark.parametrize("name", ["zb-2p", "v-min", "v-half", "v-zb"])
@pytest.mark.parametrize(("d", "n"), [(4, 8), (6, 13), (8, 32)])
def test_planned_for_the_costs_there_are_it_runs_shorter(name: str, d: int, n: int):
    costs = Costs.parse(REAL)
    planned_for_others = timed(planned(name, d, n).schedule, costs)
    assert planned(name, d, n, REAL).makespan < planned_for_others.makespan


@pytest.mark.parametrize("name", ["v-min", "v-half", "v-zb"])
@pytest.mark.parametrize("heavy", ["first", "last"])
@pytest.mark.parametrize(("d", "n"), [(4, 8), (6, 9), (8, 16)])
def test_planned_for_a_heavy_end_it_runs_shorter(name: str, heavy: str, d: int, n: int):
    """An embedding or an output layer makes an end of the model heavier; both are on rank 0 of a V."""
    even = [1.0] * (2 * d - 1)
    weights = (1.6, *even) if heavy == "first" else (*even, 1.6)
    costs = uneven(Costs.parse(REAL), weights)
    blind = timed(planned(name, d, n, REAL).schedule, costs)
    knowing = timed(plan(Request(name, d, n, costs)), costs)
    assert knowing.makespan < blind.makespan


@pytest.mark.parametrize("name", SEARCHED)
@pytest.mark.parametrize("unit", [2**-20, 2**-10, 2**10, 2**20])
def test_the_unit_of_time_does_not_matter(name: str, unit: float):
    """A pass of a millisecond is 0.001, 1, 1,000 or 1,000,000, and its plan the same; powers of two round nothing."""
    costs = Costs.parse(REAL)
    scaled = costs.scaled(lambda time: unit * time)
    for d, n in ((4, 9), (8, 24)):
        makespan = timed(plan(Request(name, d, n, scaled)), scaled).makespan
        assert makespan / unit == pytest.approx(planned(name, d, n, REAL).makespan)
