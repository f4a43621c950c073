"""Which stage has how many layers: never longer than the even partition, and as good as trying them all."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest

from megatron.schedules.planner.layer_partition import as_layout, partition_layers
from megatron.schedules.planner.partition_plans import Partition, microbatches_held, with_layers
from megatron.schedules.planner.plan_cache import cached_partition
from megatron.schedules.planner.registry import Request, plan, unchecked_plan
from megatron.schedules.planner.service import planning_seconds
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.kinds import Kind
from megatron.schedules.schedule.model_loads import Load, ModelLoads, Part
from megatron.schedules.schedule.model_memory import EndMemory, LayerMemory, ModelMemory
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.simulator import Timeline, simulate
from megatron.schedules.search.lower_bound import lower_bound
from megatron.schedules.utils.cores import THREADS_VARIABLE
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.progress import Progress
from tests.tiers import by_night, of_which_by_day, some_by_night

LAYER = Part(split=Load(10, 12, 8, 100))
COSTS = Costs.of(1, 1.1, 0.75, 0.05)
ADAPTIVE: dict[str, Any] = {"memory_limit": 0.75, "search_seconds": 0.2, "chunk_choices": (2,)}


def asked(name: str, d: int, n: int, layers: int, ends: float = 2.6, **more: Any) -> Request:
    """A model whose output layer takes as long as ``ends`` layers."""
    output = Part(whole=Load(10 * ends, 12 * ends, 8 * ends, 100.0))
    more = ADAPTIVE | more if name == "adaptive" else more
    return Request(name, d, n, replace(COSTS, model=ModelLoads(Part(), (LAYER,) * layers, output)), **more)


def timed(request: Request) -> Timeline:
    schedule = plan(request)
    return simulate(schedule, request.costs_on(schedule.placement))


def all_partitions(layers: int, stages: int) -> Iterator[Partition]:
    if stages == 1:
        yield (layers,)
        return
    for first in range(layers + 1):
        yield from ((first, *rest) for rest in all_partitions(layers - first, stages - 1))


@pytest.mark.parametrize(
    ("name", "d", "n", "layers"),
    [
        ("1f1b", 4, 8, 9),
        ("zb-1p", 4, 6, 8),
        ("v-half", 2, 6, 9),
        ("v-zb", 2, 5, 8),
        ("interleaved-1f1b", 2, 6, 8),
        by_night("v-half", 4, 6, 8),
        by_night("v-zb", 4, 8, 12),
    ],
)
def test_within_one_per_cent_of_the_best_of_all_partitions(name: str, d: int, n: int, layers: int):
    request = asked(name, d, n, layers)
    found = partition_layers(request)
    assert found.costs == request.costs, "costs never change"
    assert found.decisions.layers is not None
    ours, even = timed(found), timed(request)

    # Those that a bound from below does not rule out, with as many microbatches at once as with even layers, no more.
    where, n = ours.schedule.placement, request.microbatches
    for each in all_partitions(layers, where.stages):
        if lower_bound(where, n, with_layers(request, each).costs_on(where), math.inf) < ours.makespan / 1.01:
            one = timed(with_layers(request, each))
            assert ours.makespan <= 1.01 * one.makespan or microbatches_held(one) > microbatches_held(even) + 1e-9
    assert microbatches_held(ours) <= microbatches_held(even) + 1e-9


@pytest.mark.parametrize(
    ("name", "ends"), [("1f1b", 0.4), ("1f1b", 2.6), ("zb-1p", 0.4), ("v-half", 0.4), ("v-zb", 2.6), ("adaptive", 0.4)]
)
def test_never_longer_than_even_layers_or_a_single_one_moved(name: str, ends: float):
    request = asked(name, 3, 7, 12, ends)
    found = partition_layers(request)
    ours, even = timed(found), request.costs.model.evenly(len(found.decisions.layers))  # type: ignore[arg-type]
    placed = replace(request, chunk_choices=found.chunk_choices)
    others = [even]
    for source, to in permutations(range(len(even)), 2):
        moved = [count + (stage == to) - (stage == source) for stage, count in enumerate(even)]
        others.append(tuple(moved))
    most = microbatches_held(timed(with_layers(placed, even)))
    for partition in others if name != "adaptive" else others[:1]:
        other = timed(with_layers(placed, partition))
        assert ours.makespan <= other.makespan + 1e-9 or microbatches_held(other) > most


@pytest.mark.parametrize(
    ("name", "d", "n", "blocks", "gained"),
    [
        ("1f1b", 4, 8, 9, 0.0),
        ("v-half", 4, 12, 8, 0.03),
        by_night("adaptive", 4, 12, 8, 0.0),
        by_night("v-zb", 4, 8, 12, 0.0),
        by_night("zb-1p", 4, 6, 8, 0.0),
        by_night("v-zb", 8, 32, 32, 0.03),
        by_night("v-half", 8, 32, 32, 0.03),
    ],
)
def test_half_blocks_plan_no_longer_than_blocks_and_shorter_where_these_are_coarse(
    name: str, d: int, n: int, blocks: int, gained: float
):
    """Attention and MLP of a block can be on different stages."""
    of_blocks = asked(name, d, n, blocks)
    model = of_blocks.costs.model
    halves = Part(split=Load(3.0, 5.0, 2.0, 30.0)), Part(split=Load(7.0, 7.0, 6.0, 70.0))
    of_halves = replace(of_blocks, costs=replace(COSTS, model=replace(model, layers=halves * blocks, block=2)))
    whole, half = (timed(partition_layers(request)).makespan for request in (of_blocks, of_halves))
    assert half <= (1 - gained) * whole + 1e-9


@pytest.mark.parametrize("limit", [0.5, by_night(1.0)])
def test_adaptive_keeps_within_its_limit_and_gains(limit: float):
    request = asked("adaptive", 4, 12, 16, memory_limit=limit)
    ours, even = timed(partition_layers(request)), timed(request)
    assert ours.peak <= 4 * limit + 1e-9
    assert ours.makespan < 0.93 * even.makespan


@pytest.mark.parametrize(("layers", "stages"), [(30, 16), (3, 4), (5, 2)])
def test_any_number_of_layers_over_any_number_of_stages(layers: int, stages: int):
    request = asked("1f1b", stages, 2 * stages, layers)
    found = partition_layers(request)
    assert found.decisions.layers is not None
    assert sum(found.decisions.layers) == layers
    assert len(found.decisions.layers) == stages
    assert timed(found).makespan < timed(request).makespan


def test_adaptive_is_never_longer_than_with_even_layers():
    """Where little is to be gained a climb and the whole search may differ on what is shorter."""
    request = asked("adaptive", 3, 6, 12, 0.0, memory_limit=0.6)
    assert timed(partition_layers(request)).makespan <= timed(request).makespan + 1e-9


def test_what_the_parameters_of_the_ends_take_is_not_there_for_activations():
    """Both tables are on the V's first rank, and take as much there as two microbatches of its layers would."""
    request = asked("adaptive", 4, 6, 8, memory_limit=1.0)
    layers = (LayerMemory(100.0, 100.0, 100.0),) * 8
    light, heavy = (
        replace(request, costs=replace(request.costs, memory=ModelMemory(layers, 0.0, EndMemory(), last)))
        for last in (EndMemory(100.0, 100.0), EndMemory(100.0, 100.0, parameters=400.0))
    )
    light, found = timed(light), timed(heavy)
    # 400 are two microbatches of a rank's layers: one and a half more than the average rank has of them.
    assert found.peaks[0] <= 4 - 1.5 + 1e-9 < light.peaks[0]
    assert max(found.peaks) <= found.limit + 1e-9 <= 4 + 1e-9
    assert found.makespan >= light.makespan - 1e-9


def test_chunks_are_chosen_with_the_layers():
    found = partition_layers(asked("adaptive", 2, 6, 8, chunk_choices=(1, 2)))
    assert found.decisions.layers is not None
    assert found.chunk_choices == (len(found.decisions.layers) // 2,)


def test_layers_do_not_depend_on_the_number_of_threads(monkeypatch):
    found = []
    for threads in ("1", "3"):
        monkeypatch.setenv(THREADS_VARIABLE, threads)
        found.append(partition_layers(asked("adaptive", 2, 6, 8, chunk_choices=(1, 2))))
    assert found[0] == found[1]


def test_the_layout_is_in_megatrons_letters():
    assert as_layout((2, 1, 0)) == "Ett|t|L"
    assert as_layout((1, 0), ahead=2) == "Et|mmL"


def test_without_a_model_there_is_nothing_to_place():
    with pytest.raises(PlanError, match="where the model is known"):
        partition_layers(Request("1f1b", 4, 8))


@pytest.mark.nightly
def test_the_plan_is_never_longer_than_the_climb_that_chose_the_layers():
    found = partition_layers(asked("adaptive", 4, 12, 12, search_seconds=0.01, chunk_choices=(2, 4)))
    assert found.start is not None
    climbed = simulate(found.start, found.costs_on(found.start.placement))
    assert timed(found).makespan <= climbed.makespan + 1e-9
    assert timed(replace(found, start=None)).makespan > climbed.makespan + 1e-9  # so short a search finds no such plan


@pytest.mark.parametrize("name", ["zb-1p", "adaptive"])
def test_what_was_found_is_kept(tmp_path, monkeypatch, name: str):
    monkeypatch.setenv("MEGATRON_SCHEDULES_CACHE", str(tmp_path))
    request = asked(name, 2, 6, 6)
    found = cached_partition(request)
    assert found == partition_layers(request)
    monkeypatch.setattr(
        "megatron.schedules.planner.plan_cache.partition_layers", lambda *asked: pytest.fail("searched again")
    )
    assert cached_partition(request) == found


@pytest.mark.parametrize(
    ("name", "factor"),
    [("v-half", 3.0), *(by_night(*case) for case in (("v-half", 1e-10), ("v-half", 7e8), ("adaptive", 1e-10)))],
)
def test_layers_placed_for_costs_in_any_unit_are_the_same(name: str, factor: float):
    request = asked(name, 2, 6, 8)
    costs = request.costs
    scaled = replace(request, costs=costs.scaled(lambda time: factor * time))
    found = partition_layers(scaled)
    assert replace(found, costs=costs) == replace(partition_layers(request), costs=costs)
    assert found.costs == scaled.costs


SIZES: list[tuple[str, int, int, int]] = [
    ("1f1b", 4, 8, 8),
    ("interleaved-1f1b", 2, 4, 9),
    ("v-half", 3, 12, 7),
    ("zb-2p", 8, 4, 20),
    ("adaptive", 2, 4, 6),
]


@pytest.mark.parametrize(("name", "d", "n", "layers"), of_which_by_day(SIZES, *SIZES[:2], SIZES[-1]))
def test_shares_of_progress_add_up_to_the_whole_when_the_search_ends(name: str, d: int, n: int, layers: int):
    shares: list[float] = []
    partition_layers(asked(name, d, n, layers), shares.append)
    assert min(shares) >= 0
    assert sum(shares) == pytest.approx(1)
    assert sum(shares[:-1]) < 1 - 1e-9  # nothing is done after the work is told to be


@pytest.mark.parametrize(
    ("name", "d", "n", "layers"),
    some_by_night([*SIZES[:4], ("v-min", 4, 64, 32), ("1f1b", 24, 2, 40)], lambda *size: size[1] > 4 or size[2] > 12),
)
def test_the_search_keeps_within_its_budget_of_passes(monkeypatch, name: str, d: int, n: int, layers: int):
    """A plan counts for its passes, a bound for two a stage, both for what calling them takes."""
    spent = {"plans": 0.0, "bounds": 0.0}

    def counted_plan(request: Request) -> Any:
        schedule = unchecked_plan(request)
        spent["plans"] += 3 * schedule.placement.stages * request.microbatches + 2000
        return schedule

    def counted_bound(placement: Any, *more: Any) -> float:
        spent["bounds"] += 2 * placement.stages
        return lower_bound(placement, *more)

    monkeypatch.setattr("megatron.schedules.planner.partition_plans.unchecked_plan", counted_plan)
    monkeypatch.setattr("megatron.schedules.planner.partition_search.lower_bound", counted_bound)
    partition_layers(asked(name, d, n, layers))
    # As many passes again for the plans of the whole request, of which some are always made.
    always = (24 + 13) * (3 * 2 * d * n + 2000)
    assert spent["plans"] <= 2 * 300_000 + always
    assert spent["bounds"] <= 4 * 300_000


def test_no_partition_is_bounded_twice(monkeypatch):
    seen: list[tuple[Any, int]] = []

    def once(placement: Any, microbatches: int, costs: Any, limit: float) -> float:
        seen.append((tuple(costs.times[Kind.F]), microbatches))
        return lower_bound(placement, microbatches, costs, limit)

    monkeypatch.setattr("megatron.schedules.planner.partition_search.lower_bound", once)
    partition_layers(asked("zb-1p", 4, 8, 16))
    assert len(seen) == len(set(seen))


@pytest.mark.parametrize("ends", [0.0, by_night(2.6)])
def test_adaptive_reports_all_parts_of_its_search(ends: float):
    """The search over each placement, the comparison of the best, and that with even layers are parts of one whole."""
    shares: list[float] = []
    partition_layers(asked("adaptive", 3, 6, 12, ends, memory_limit=0.6, chunk_choices=(1, 2)), shares.append)
    assert sum(shares) == pytest.approx(1)
    assert max(shares) < 0.9


def test_the_plan_that_is_compared_with_even_layers_need_not_be_made_again():
    planned: list[Request] = []

    def recorded(request: Request, progress: Progress) -> Schedule:
        planned.append(request)
        return plan(request, progress)

    found = partition_layers(asked("adaptive", 2, 4, 4, 0.0), planned=recorded)
    assert len(planned) > 1
    assert found in planned


def test_the_time_that_is_announced_counts_the_search_for_layers():
    for name in ("adaptive", "auto"):
        request = Request(name, 4, 8, asked("1f1b", 4, 8, 16).costs, memory_limit=0.75)
        assert planning_seconds(replace(request, partition=True)) > planning_seconds(request) + 5
