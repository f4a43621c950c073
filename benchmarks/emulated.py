"""Throughput of iterations: our engine, stock megatron-core and torch, with passes that sleep for a known time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import click

from benchmarks.emulated_section import KEY, claims, section
from benchmarks.parts import Part, Row, Say, Statistics
from megatron.schedules.planner.request import Request
from megatron.schedules.schedule.cost_parts import Link
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.simulator import simulate
from megatron.schedules.schedule.stage_costs import StageCosts
from megatron.schedules.utils.errors import PlanError

if TYPE_CHECKING:
    from benchmarks.emulated_engines import Contestant

UNIT_S = 0.020
"""Duration of a pass of cost 1 over half a rank's layers."""

_COSTS = ("1,1,1", "1,1.1,0.75", "1,1.2,0.4")
_REPETITIONS, _KEY_REPETITIONS = 3, 5
_FIT_STEPS = 16


def measure(
    quick: bool, say: Say, pipeline_size: int | None = None, microbatches: int | None = None, costs: str | None = None
) -> Iterator[Row]:
    """Yields a row for each schedule of each engine in every setting; stock 1F1B's is the first."""
    for d, each, text in product(
        [pipeline_size] if pipeline_size else (4, 8) if quick else (4, 8, 16),
        [None] if microbatches else (2,) if quick else (2, 4),
        [_three(costs)] if costs else (KEY[2],) if quick else _COSTS,
    ):
        n = microbatches if each is None else each * d
        assert n is not None
        yield from _setting(d, n, text, _KEY_REPETITIONS if (d, n, text) == KEY and not quick else _REPETITIONS, say)


def _three(text: str) -> str:
    try:
        found = Costs.parse(text)
    except PlanError as error:
        raise click.BadParameter(str(error), param_hint="--costs") from None
    if text.count(",") != 2:
        raise click.BadParameter("three numbers, F,I,W: P2P latency is measured", param_hint="--costs")
    return ",".join(f"{time:g}" for time in found.layers.passes)


def _setting(d: int, n: int, text: str, repetitions: int, say: Say) -> Iterator[Row]:
    from benchmarks.emulated_engines import adaptive, others, ours  # Megatron, which --help need not wait for

    units = Costs.parse(text)
    costs = Costs.of(*(UNIT_S * time for time in units.layers.passes))
    request = Request("1f1b", d, n, units)
    name = f"d={d}, n={n}, costs {text}"
    say(f"{name}: ours by name once, for the P2P latency")
    by_name = ours(request)
    beforehand = _fitted_latency(by_name, _timed(by_name, costs, 1), costs)
    # Nothing else of the costs is left to measure: this is how adaptive is meant to be used.
    say(f"{name}: planning adaptive for a P2P latency of {beforehand * 1e3:.2f} ms")
    measured = replace(request, costs=replace(units, link=Link(beforehand / UNIT_S)))
    found = [*others(by_name), *by_name, *adaptive(measured)]
    say(f"{name}: {repetitions} repetitions, about {_expected(found, costs) * repetitions:.0f} s")
    timings = _timed(found, costs, repetitions)
    latency = _fitted_latency(found, timings, costs)
    say(f"{name}: P2P latency is {latency * 1e3:.2f} ms as fitted to ours")
    setting = {"pipeline_size": d, "microbatches": n, "costs": text, "repetitions": repetitions}
    setting |= {"latency_seconds": latency, "latency_seconds_beforehand": beforehand}
    for one, timing in zip(found, timings, strict=True):
        yield _row(one, timing, costs, setting) | {"speedup_over_stock_1f1b": round(timings[0].per(timing), 4)}


def _timed(found: Sequence[Contestant], costs: Costs, repetitions: int) -> list[Statistics]:
    from benchmarks.emulated_engines import measure

    timeout, on_stages = (
        4 * _expected(found, costs) * repetitions + 180,
        [costs.on(one.schedule.placement) for one in found],
    )
    return [Statistics.of(taken) for taken in measure(found, on_stages, repetitions, timeout)]


def _expected(found: Sequence[Contestant], costs: Costs) -> float:
    return sum(simulated(one.schedule, costs.on(one.schedule.placement), 0.0) for one in found)


def _row(one: Contestant, timing: Statistics, costs: Costs, setting: Mapping[str, Any]) -> dict[str, Any]:
    on_stages = costs.on(one.schedule.placement)
    expected = simulated(one.schedule, on_stages, setting["latency_seconds"])
    seconds, low, high = (round(value, 4) for value in timing)
    return {
        "engine": one.engine,
        "schedule": one.name,
        **setting,
        "seconds": seconds,
        "low": low,
        "high": high,
        "simulated_seconds": round(expected, 4),
        "simulated_seconds_without_latency": round(simulated(one.schedule, on_stages, 0.0), 4),
        "error": round(timing.median / expected - 1, 4),
        "memory": simulate(one.schedule, on_stages).peak,
    }


def simulated(schedule: Schedule, costs: StageCosts, latency: float) -> float:
    """Returns the simulated seconds of an iteration."""
    return simulate(schedule, replace(costs, comm=latency)).makespan


def _fitted_latency(found: Sequence[Contestant], timings: Sequence[Statistics], costs: Costs) -> float:
    """Returns the P2P latency that fits our schedules."""
    pairs = [(one.schedule, s.median) for one, s in zip(found, timings, strict=True) if one.engine == "ours"]
    return fitted_latency([(each, costs.on(each.placement), seconds) for each, seconds in pairs], UNIT_S / 2)


def fitted_latency(measured: Sequence[tuple[Schedule, StageCosts, float]], most: float) -> float:
    """Returns the P2P latency, up to ``most``, with the smallest squared error of the simulator.

    Args:
        measured: schedules, their costs in seconds, and the seconds that they took.
        most: seconds.
    """

    return fitted([(partial(simulated, schedule, costs), seconds) for schedule, costs, seconds in measured], most)


def fitted(measured: Sequence[tuple[Callable[[float], float], float]], most: float) -> float:
    """Returns the same from the simulated time for a latency, and the measured seconds."""

    def wrong(latency: float) -> float:
        return sum((seconds / expected(latency) - 1) ** 2 for expected, seconds in measured)

    low, high = 0.0, most
    for _ in range(_FIT_STEPS):  # each leaves out the worse third
        one, other = low + (high - low) / 3, high - (high - low) / 3
        low, high = (low, other) if wrong(one) < wrong(other) else (one, high)
    return round((low + high) / 2, 6)


PART = Part("emulated", "Throughput", measure, claims, section)
