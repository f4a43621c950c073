"""Messages of experts behind weight gradients: our engine beside stock's interleaved 1F1B, with passes that sleep."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.emulated import fitted_latency, simulated
from benchmarks.messages_section import ALL_HIDDEN, EXPOSED, HIDDEN, STOCK, claims, section
from benchmarks.parts import Part, Row, Say, Statistics
from megatron.schedules.planner.registry import Request, plan
from megatron.schedules.schedule.cost_parts import LayerTimes, Link, MemoryShares
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.simulator import simulate

if TYPE_CHECKING:
    from benchmarks.emulated_engines import Contestant

_UNIT_S = 0.020
_RANKS, _MICROBATCHES, _QUICK_MICROBATCHES, _REPETITIONS = 8, 32, 16, 5
# F and I contain the messages. W keeps .6 of the memory.
_COSTS = Costs(LayerTimes(1.3, 1.4, 0.75, (0.3, 0.3)), link=Link(0.05), memory=MemoryShares(0.6))
_NAMED, _LIMITS = ("v-zb", "v-half", "zb-1p"), (8.5, 5.5)


class _Run(NamedTuple):
    """A schedule that runs.

    Args:
        contestant: the engine and its order.
        messages: what becomes of the messages.
        costs: costs of the passes.
    """

    contestant: Contestant
    messages: str
    costs: Costs

    @property
    def simulated(self) -> Costs:
        """Costs for the simulator, which hides what may be hidden."""
        return self.costs if self.messages == HIDDEN else self.costs.without_messages


def measure(quick: bool, say: Say) -> Iterator[Row]:
    """Yields a row for each schedule and what becomes of its messages; stock's with exposed messages is the first."""
    yield from setting(_RANKS, _QUICK_MICROBATCHES if quick else _MICROBATCHES, 1 if quick else _REPETITIONS, say)


def setting(ranks: int, microbatches: int, repetitions: int, say: Say) -> Iterator[Row]:
    """Yields the rows of one size."""
    from benchmarks.emulated_engines import measure as timed  # Megatron, which --help need not wait for

    say(f"messages: planning for {ranks} ranks and {microbatches} microbatches")
    runs = list(_runs(Request("1f1b", ranks, microbatches, _COSTS)))
    schedules = [each.contestant.schedule for each in runs]
    slept, expected = (
        [_in_seconds(costs).on(schedule.placement) for costs, schedule in zip(every, schedules, strict=True)]
        for every in ([each.costs for each in runs], [each.simulated for each in runs])
    )
    whole = repetitions * sum(simulate(*each).makespan for each in zip(schedules, expected, strict=True))
    say(f"messages: {repetitions} repetitions, about {whole:.0f} s")
    taken = timed([each.contestant for each in runs], slept, repetitions, 4 * whole + 180)
    found = list(zip(runs, schedules, expected, [Statistics.of(each) for each in taken], strict=True))
    ours = [(schedule, costs, timing.median) for run, schedule, costs, timing in found if _is_ours(run)]
    latency, baseline = fitted_latency(ours, _UNIT_S / 2), found[0][-1]
    for run, schedule, costs, timing in found:
        should, timeline = simulated(schedule, costs, latency), simulate(schedule, costs)
        travelling = sum(timeline.hidden) + sum(timeline.exposed)
        yield {
            "engine": run.contestant.engine,
            "schedule": run.contestant.name.partition(",")[0],
            "messages": run.messages,
            "pipeline_size": ranks,
            "microbatches": microbatches,
            "costs": "1,1.1,0.75,0.05",
            "message": _COSTS.layers.messages[0],
            "repetitions": repetitions,
            "latency_seconds": latency,
            "seconds": round(timing.median, 4),
            "low": round(timing.low, 4),
            "high": round(timing.high, 4),
            "simulated_seconds": round(should, 4),
            "error": round(timing.median / should - 1, 4),
            "hidden": round(sum(timeline.hidden) / travelling, 4) if travelling else 0.0,
            "speedup_over_stock_exposed": round(baseline.per(timing), 4),
            "memory": timeline.peak,
        }


def _runs(request: Request) -> Iterator[_Run]:
    from benchmarks import emulated_messages
    from benchmarks.emulated_engines import of_ours, stocks

    costs, layers = _COSTS, _COSTS.layers
    alone = costs.without_messages
    (forward, input_grad), weight_grad = layers.messages, layers.weight_grad
    without = replace(costs, layers=LayerTimes(layers.forward - forward, layers.input_grad - input_grad, weight_grad))
    order = plan(replace(request, schedule="interleaved-1f1b", costs=alone))
    stock = stocks(STOCK, order)
    yield _Run(_waiting(stock), EXPOSED, costs)
    yield _Run(stock, ALL_HIDDEN, without)
    for name in _NAMED:
        yield _Run(of_ours(name, replace(request, schedule=name), emulated_messages.start), HIDDEN, costs)
        found = of_ours(f"{name}, {EXPOSED}", replace(request, schedule=name, costs=alone))
        yield _Run(_waiting(found), EXPOSED, costs)
    for limit in _LIMITS:
        wanted = replace(request, schedule="adaptive", memory_limit=limit / request.ranks)
        yield _Run(of_ours(f"adaptive {limit / request.ranks:g}", wanted, emulated_messages.start), HIDDEN, costs)


def _waiting(contestant: Contestant) -> Contestant:
    """Returns the same with nothing behind the messages."""
    from benchmarks.emulated_messages import exposed

    return contestant._replace(start=exposed(contestant.start))


def _is_ours(run: _Run) -> bool:
    return run.contestant.engine == "ours"


def _in_seconds(costs: Costs) -> Costs:
    return costs.scaled(lambda time: _UNIT_S * time)


PART = Part("messages", "Messages of experts", measure, claims, section)
