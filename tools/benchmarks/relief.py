"""Recompute and offload placed by the plan, in real processes with real tensors, beside what stock does for memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron.schedules.estimate.transformer import Layer, decoder_layer
from megatron.schedules.job.spec import StockRecompute
from megatron.schedules.planner.adaptive import least_limit
from megatron.schedules.planner.plan_cache import kept_plan, kept_relief
from megatron.schedules.planner.registry import Request
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.simulator import simulate
from tools.benchmarks.emulated import fitted_latency, simulated
from tools.benchmarks.parts import Part, Row, Say, Spread
from tools.benchmarks.relief_section import section

if TYPE_CHECKING:
    from megatron.schedules.runtime.activation_meter import ActivationMeter
    from tools.benchmarks.emulated_passes import Passes

UNIT_S = 0.040
RANK_BYTES = 2**22
"""A microbatch's activations on a rank: much more than a message, and quickly made."""

STOCK_LAYERS = 8
"""Of a rank under stock's 1F1B: where it recomputes it does so one at a time."""

COSTS = Costs(1, 1.1, 0.75, 0.05)
ONE_WAY = 0.25
"""Of what half a rank's layers compute for a microbatch: how long their activations are copied in one direction."""

SEARCH_SECONDS: float | None = None
"""See :class:`.Request`."""

SIZES = ((4, 16), (8, 16))
LIMITS = (0.25, 0.375)
RELIEFS = {"nothing": (False, False), "R": (True, False), "O, L": (False, True), "R, O, L": (True, True)}
_REPETITIONS = 3

# A layer of 4096 units and 32 heads, 2048 tokens long: an 8B model's.
_HIDDEN = 4096
_WIDE = partial(decoder_layer, _HIDDEN, 32, 2048)
STOCK: dict[str, tuple[str | None, list[str], Layer]] = {
    "nothing": (None, [], _WIDE()),
    "full recompute": ("full", [], _WIDE()),
    "selective recompute: core_attn, scores kept": ("selective", ["core_attn"], _WIDE(fused=False)),
    "selective recompute: mlp layernorm, fused attention": ("selective", ["mlp", "layernorm"], _WIDE()),
}


class Entry(NamedTuple):
    """Who takes part.

    Args:
        engine, schedule, relief: whose, which order, and what gives memory back.
        limit: of 1F1B's memory; None where none was asked for.
        order: for the simulator.
        costs: in seconds.
        start: called on each rank, with what counts its tensors if anything does; gives what runs one iteration.
    """

    engine: str
    schedule: str
    relief: str
    limit: float | None
    order: Schedule
    costs: Costs
    start: Callable[[Passes, ActivationMeter | None], Callable[[], None]]


def measure(quick: bool, say: Say) -> Iterator[Row]:
    """A row for each entry of each size; stock 1F1B's is the first."""
    for d, n in SIZES[:1] if quick else SIZES:
        yield from setting(d, n, LIMITS[:1] if quick else LIMITS, 1 if quick else _REPETITIONS, say)


def setting(d: int, n: int, limits: Sequence[float], repetitions: int, say: Say) -> Iterator[Row]:
    """The rows of one size."""
    from tools.benchmarks.relief_ranks import peaks, timed  # Megatron, which --help need not wait for

    say(f"relief: planning for {d} ranks, {n} microbatches")
    entries = [*_stocks(d, n), *_ours(d, n, limits)]
    expected = sum(simulated(each.order, each.costs, 0.0) for each in entries)
    say(f"relief: {d} ranks, {n} microbatches: counting bytes, then about {expected * repetitions:.0f} s")
    held = peaks(entries, 4 * expected + 120)
    spreads = [Spread.of(each) for each in timed(entries, repetitions, 4 * expected * repetitions + 180)]
    ours = [
        (each.order, each.costs, spread.median)
        for each, spread in zip(entries, spreads, strict=True)
        if each.engine == "ours"
    ]
    latency = fitted_latency(ours, UNIT_S / 2)
    for each, spread, ranks in zip(entries, spreads, held, strict=True):
        row = _row(each, spread, latency) | {"measured_bytes": ranks, "held": max(ranks) / max(held[0])}
        yield row | {"repetitions": repetitions, "time_over_stock_1f1b": round(spread.per(spreads[0]), 4)}


def _row(entry: Entry, spread: Spread, latency: float) -> dict[str, Any]:
    expected = simulated(entry.order, entry.costs, latency)
    seconds, low, high = (round(value, 4) for value in spread)
    peaks = simulate(entry.order, entry.costs.on(entry.order.placement)).peaks
    return {
        "engine": entry.engine,
        "schedule": entry.schedule,
        "relief": entry.relief,
        "limit": entry.limit,
        "pipeline_size": entry.order.ranks,
        "microbatches": entry.order.microbatches,
        "hop_seconds": latency,
        "seconds": seconds,
        "low": low,
        "high": high,
        "simulated_seconds": round(expected, 4),
        "error": round(spread.median / expected - 1, 4),
        "planned_bytes": [round(peak * RANK_BYTES) for peak in peaks],
        "again": entry.costs.recompute + _mean(entry.costs.redone),
        "offloaded": _mean(entry.costs.offloaded),
        "emulated": {"milliseconds": 1e3 * UNIT_S, "mebibytes": RANK_BYTES / 2**20, "layers": STOCK_LAYERS},
    }


def _mean(shares: tuple[float, ...] | None) -> float:
    return sum(shares) / len(shares) if shares else 0.0


def _in_seconds(costs: Costs) -> Costs:
    times = ("forward", "input_grad", "weight_grad", "comm", "copy")
    return replace(costs, **{name: getattr(costs, name) * UNIT_S for name in times})


def _stocks(d: int, n: int) -> Iterator[Entry]:
    from tools.benchmarks.relief_ranks import start_stock

    for relief, (granularity, modules, layer) in STOCK.items():
        recompute = StockRecompute(granularity, "uniform", 1, tuple(modules or ()))
        costs = replace(
            COSTS,
            recompute=recompute.share(layer, layers_a_stage=STOCK_LAYERS),
            kept=_kept(granularity, modules, layer),
            weight_share=1.0 if granularity is None else 1 - layer.scores.held / layer.whole.held,
        )
        order = kept_plan(Request("1f1b", d, n, costs))
        start = partial(start_stock, order.placement, n, RANK_BYTES, RANK_BYTES // STOCK_LAYERS)
        yield Entry("megatron-core", "1F1B", relief, None, order, _in_seconds(costs), start)


def _kept(granularity: str | None, modules: Sequence[str], layer: Layer) -> float:
    """The part of a layer's activations that stock's forward leaves."""
    if granularity == "full":
        return 2.0 * _HIDDEN / layer.whole.held
    parts = {"core_attn": layer.scores, "mlp": layer.mlp, "layernorm": layer.norms}
    return 1 - sum(parts[module].held for module in modules) / layer.whole.held


def _ours(d: int, n: int, limits: Sequence[float]) -> Iterator[Entry]:
    yield _of_ours(Request("v-zb", d, n, COSTS), "nothing")
    computing = COSTS.forward + COSTS.input_grad + COSTS.weight_grad
    for limit in limits:
        for relief, (recompute, offload) in RELIEFS.items():
            costs = replace(COSTS, copy=ONE_WAY * computing if offload else 0.0)
            asked = Request(
                "adaptive",
                d,
                n,
                costs,
                memory_limit=limit,
                search_seconds=SEARCH_SECONDS,
                recompute=recompute,
                offload=offload,
            )
            if limit >= least_limit(asked):
                yield _of_ours(kept_relief(asked) if recompute or offload else asked, relief)


def _of_ours(request: Request, relief: str) -> Entry:
    from tools.benchmarks.relief_ranks import start_ours

    order = kept_plan(request)
    start = start_ours(order, request.costs, RANK_BYTES)
    name = request.schedule if request.memory_limit is None else f"{request.schedule} {request.memory_limit:g}"
    return Entry("ours", name, relief, request.memory_limit, order, _in_seconds(request.costs), start)


PART = Part("relief", "Recompute and offload in the plan", measure, section)
