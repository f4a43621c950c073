"""Microbatches of different lengths, planned for equal lengths and for their own; simulated and emulated."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.emulated import fitted
from benchmarks.lengths_section import claims, section
from benchmarks.parts import Part, Row, Say, Statistics
from megatron.schedules.estimate import times
from megatron.schedules.estimate.models import MODELS, built
from megatron.schedules.planner.microbatch_lengths import LengthsPlan, LengthsPlanner
from megatron.schedules.planner.registry import Request, plan
from megatron.schedules.schedule.cost_parts import LayerTimes, Link
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.simulator import simulate
from megatron.schedules.schedule.stage_costs import MicrobatchLoads

if TYPE_CHECKING:
    from benchmarks.emulated_engines import Contestant

_RANKS, _CONTEXT, _SHORTEST = 8, 131_072, 64
# Llama-3-8B at that context.
_MODEL = built(MODELS["Llama-3-8B"].trained(seq_length=_CONTEXT))
# Tokens of a document: log-normal, by its median; the deviation of its logarithm. Packed one after another into
# microbatches of a context each, a document going on in no other. Or one a microbatch, evenly from the least on.
_PACKED, _DEVIATION = {"packed, median 2,000": 2_000, "packed, median 8,000": 8_000}, 2.0
_ALONE, _LEAST = "one a microbatch, a quarter of a context or more", _CONTEXT // 4
_DRAWS = (*_PACKED, _ALONE)
_SCHEDULES = ("1f1b", "v-half", "v-zb", "adaptive 0.5", "adaptive 1")
_EMULATED = ("v-zb", "1f1b", "v-half", "adaptive 1")
_SETS, _QUICK_SETS, _REPETITIONS = 40, 5, 3
_UNIT_S, _LATENCY_S = 0.040, 0.001


class _Setting(NamedTuple):
    """One schedule and one distribution of lengths.

    Args:
        name: of the schedule.
        costs: of a microbatch that is one whole context.
        planner: of iterations.
    """

    name: str
    costs: Costs
    planner: LengthsPlanner


def measure(quick: bool, say: Say) -> Iterator[Row]:
    """Yields a simulated row for each schedule, size and distribution, and emulated ones of a few iterations."""
    for n in (16,) if quick else (16, 32):
        for drawn in _DRAWS[: 1 if quick else None]:
            for name in _EMULATED if quick else _SCHEDULES:
                say(f"lengths: {name}, {n} microbatches, {drawn}")
                yield _simulated(_setting(name, n, drawn), n, drawn, _QUICK_SETS if quick else _SETS)
    for drawn in _DRAWS[: 1 if quick else None]:
        yield from _emulated(drawn, 1 if quick else _REPETITIONS, say)


def lengths_of(n: int, drawn: str, draw: random.Random) -> list[list[int]]:
    """Returns the lengths of the sequences of each of ``n`` microbatches."""
    if drawn == _ALONE:
        return [[draw.randint(_LEAST, _CONTEXT)] for _ in range(n)]

    def document() -> int:
        return max(_SHORTEST, min(_CONTEXT, round(draw.lognormvariate(math.log(_PACKED[drawn]), _DEVIATION))))

    found = []
    for _ in range(n):
        sequences: list[int] = []
        left = _CONTEXT
        while left:
            sequences.append(min(document(), left))
            left -= sequences[-1]
        found.append(sequences)
    return found


def _sets(n: int, drawn: str, count: int) -> list[MicrobatchLoads]:
    draw = random.Random(f"{n} {drawn}")
    return [MicrobatchLoads.of(lengths_of(n, drawn, draw), _CONTEXT) for _ in range(count)]


@cache
def _setting(name: str, n: int, drawn: str) -> _Setting:
    """Returns the schedule planned for equal microbatches of the average cost."""
    shares, ratio = times.attention_shares(_MODEL), times.loads(_MODEL).ratio
    costs = Costs(LayerTimes(*ratio, attention=shares), link=Link(_LATENCY_S / _UNIT_S))
    every = _sets(n, drawn, 200)
    tokens, squares = (statistics.fmean(x for each in every for x in getattr(each, of)) for of in ("tokens", "squares"))
    parts = [(1 - share) * tokens + share * squares for share in (*shares, 0.0)]
    word, _, limit = name.partition(" ")
    forward, input_grad, weight_grad = (time * part for time, part in zip(ratio, parts, strict=True))
    alike = Costs.of(forward, input_grad, weight_grad, costs.link.latency)
    request = Request(word, _RANKS, n, alike, memory_limit=float(limit) if limit else None)
    return _Setting(name, costs, LengthsPlanner(plan(request), costs, float(limit) * _RANKS if limit else None))


def _simulated(setting: _Setting, n: int, drawn: str, count: int) -> Row:
    planner = setting.planner
    planner.plan(_sets(n, drawn, 1)[0], 1)  # machine code is read or made once
    usual, planned, seconds, processor = [], [], [], []
    for loads in _sets(n, drawn, count):
        begin, ticks = time.monotonic(), time.thread_time()
        found = planner.plan(loads)
        seconds.append(time.monotonic() - begin)
        processor.append(time.thread_time() - ticks)
        usual.append(_over_work(planner.usual(loads)))
        planned.append(_over_work(found))
    return {
        "what": "simulated",
        "schedule": setting.name,
        "microbatches": n,
        "drawn": drawn,
        "sets": count,
        "usual_mean": round(statistics.fmean(usual), 4),
        "usual_worst": round(max(usual), 4),
        "planned_mean": round(statistics.fmean(planned), 4),
        "planned_worst": round(max(planned), 4),
        "seconds_mean": round(statistics.fmean(seconds), 3),
        "seconds_worst": round(max(seconds), 3),
        "processor_seconds_worst": round(max(processor), 3),
    }


def _over_work(found: LengthsPlan) -> float:
    return found.timeline.makespan / found.timeline.ideal


def _emulated(drawn: str, repetitions: int, say: Say) -> Iterator[Row]:
    from benchmarks.emulated_engines import measure as timed  # Megatron, which --help need not wait for

    n = 2 * _RANKS
    (loads,) = _sets(n, drawn, 1)
    found: list[tuple[str, Costs, LengthsPlan]] = []
    for name in _EMULATED:
        setting = _setting(name, n, drawn)
        seconds = replace(setting.costs.scaled(lambda time: _UNIT_S * time), link=Link(_LATENCY_S))
        found += [("equal", seconds, setting.planner.usual(loads)), ("lengths", seconds, setting.planner.plan(loads))]
    contestants = [_contestant(name, planned, costs, loads) for name, (_, costs, planned) in _named(found)]
    expected = sum(_seconds(planned, costs, loads, _LATENCY_S) for _, costs, planned in found)
    say(f"lengths: emulated, {drawn}, about {expected * repetitions:.0f} s")
    on_stages = [costs.on(planned.schedule.placement) for _, costs, planned in found]
    taken = timed(contestants, on_stages, repetitions, 4 * expected * repetitions + 180)
    timings = [Statistics.of(each) for each in taken]
    pairs = [
        (lambda latency, costs=costs, planned=planned: _seconds(planned, costs, loads, latency), timing.median)
        for (_, costs, planned), timing in zip(found, timings, strict=True)
    ]
    latency = fitted(pairs, _UNIT_S / 4)
    for (name, (planned_for, costs, planned)), timing in zip(_named(found), timings, strict=True):
        simulated = _seconds(planned, costs, loads, latency)
        yield {
            "what": "emulated",
            "schedule": name,
            "planned_for": planned_for,
            "microbatches": n,
            "drawn": drawn,
            "repetitions": repetitions,
            "latency_seconds": latency,
            "seconds": round(timing.median, 4),
            "low": round(timing.low, 4),
            "high": round(timing.high, 4),
            "simulated_seconds": round(simulated, 4),
            "error": round(timing.median / simulated - 1, 4),
        }


def _named[T](found: Sequence[T]) -> list[tuple[str, T]]:
    """Returns each with the name of its schedule, two of each."""
    return [(_EMULATED[at // 2], each) for at, each in enumerate(found)]


def _contestant(name: str, planned: LengthsPlan, costs: Costs, loads: MicrobatchLoads) -> Contestant:
    from benchmarks.emulated_engines import of_plan

    on_stages = costs.on(planned.schedule.placement)
    return of_plan(name, planned.schedule, on_stages)._replace(loads=loads.in_order(planned.order))


def _seconds(planned: LengthsPlan, costs: Costs, loads: MicrobatchLoads, latency: float) -> float:
    own = replace(costs, link=Link(latency)).on(planned.schedule.placement)
    return simulate(planned.schedule, replace(own, loads=loads.in_order(planned.order))).makespan


PART = Part("lengths", "Microbatches of different lengths", measure, claims, section)
