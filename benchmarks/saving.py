"""Recompute and offload by the plan, in real processes with real tensors, compared with stock's memory saving."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.emulated import fitted_latency, simulated
from benchmarks.parts import Part, Row, Say, Statistics
from benchmarks.saving_entry import Entry
from benchmarks.saving_section import claims, section
from megatron.schedules.estimate.build_flags import stock_recompute
from megatron.schedules.estimate.device_memory import model_memory
from megatron.schedules.estimate.model_build import recomputed_share
from megatron.schedules.estimate.models import built, gpt
from megatron.schedules.planner.adaptive import least_limit
from megatron.schedules.planner.registry import Request
from megatron.schedules.planner.service import make_plan
from megatron.schedules.schedule.cost_parts import HostCopies, MemoryShares
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.simulator import simulate

UNIT_S = 0.040
RANK_BYTES = 2**22
"""A microbatch's activations on a rank: much more than a message, and quickly made."""

STOCK_LAYERS = 8
"""Layers of a rank under stock's 1F1B, which recomputes one at a time."""

COSTS = Costs.of(1, 1.1, 0.75, 0.05)
ONE_WAY = 0.25
"""Time of a copy one way, as a share of the computing of the same layers."""

SEARCH_SECONDS: float | None = None
"""See :class:`.Request`."""

SIZES = ((4, 16), (8, 16))
LIMITS = (0.25, 0.375)
MEMORY_SAVINGS = {"nothing": (False, False), "R": (True, False), "O, L": (False, True), "R, O, L": (True, True)}
_REPETITIONS = 3

# A layer of 4096 units and 32 heads, 2048 tokens long: an 8B model's.
_WIDE = gpt("a layer", 1, 32, 4096, 2048)
# Granularity, modules, and whose layers.
STOCK: dict[str, tuple[str | None, list[str], str]] = {
    "nothing": (None, [], "transformer_engine"),
    "full recompute": ("full", [], "transformer_engine"),
    "selective recompute: core_attn, scores kept": ("selective", ["core_attn"], "local"),
    "selective recompute: mlp layernorm, fused attention": ("selective", ["mlp", "layernorm"], "transformer_engine"),
}


def measure(quick: bool, say: Say) -> Iterator[Row]:
    """Yields a row for each entry of each size; stock 1F1B's is the first."""
    for d, n in SIZES[:1] if quick else SIZES:
        yield from setting(d, n, LIMITS[:1] if quick else LIMITS, 1 if quick else _REPETITIONS, say)


def setting(d: int, n: int, limits: Sequence[float], repetitions: int, say: Say) -> Iterator[Row]:
    """Yields the rows of one size."""
    from benchmarks.saving_ranks import peaks, timed  # Megatron, which --help need not wait for

    say(f"memory saving: planning for {d} ranks, {n} microbatches")
    entries = [*_stocks(d, n), *_ours(d, n, limits)]
    expected = sum(simulated(each.order, each.costs, 0.0) for each in entries)
    say(f"memory saving: {d} ranks, {n} microbatches: counting bytes, then about {expected * repetitions:.0f} s")
    held = peaks(entries, 4 * expected + 120)
    timings = [Statistics.of(each) for each in timed(entries, repetitions, 4 * expected * repetitions + 180)]
    ours = [
        (each.order, each.costs, timing.median)
        for each, timing in zip(entries, timings, strict=True)
        if each.engine == "ours"
    ]
    latency = fitted_latency(ours, UNIT_S / 2)
    for each, timing, ranks in zip(entries, timings, held, strict=True):
        row = _row(each, timing, latency) | {"measured_bytes": ranks, "held": max(ranks) / max(held[0])}
        yield row | {"repetitions": repetitions, "time_over_stock_1f1b": round(timing.per(timings[0]), 4)}


def _row(entry: Entry, timing: Statistics, latency: float) -> dict[str, Any]:
    expected = simulated(entry.order, entry.costs, latency)
    seconds, low, high = (round(value, 4) for value in timing)
    peaks = simulate(entry.order, entry.costs).peaks
    return {
        "engine": entry.engine,
        "schedule": entry.schedule,
        "memory_saving": entry.memory_saving,
        "limit": entry.limit,
        "pipeline_size": entry.order.ranks,
        "microbatches": entry.order.microbatches,
        "latency_seconds": latency,
        "seconds": seconds,
        "low": low,
        "high": high,
        "simulated_seconds": round(expected, 4),
        "error": round(timing.median / expected - 1, 4),
        "planned_bytes": [round(peak * RANK_BYTES) for peak in peaks],
        "recomputed": entry.recomputed,
        "offloaded": entry.offloaded,
        "emulated": {"milliseconds": 1e3 * UNIT_S, "mebibytes": RANK_BYTES / 2**20, "layers": STOCK_LAYERS},
    }


def _in_seconds(costs: Costs) -> Costs:
    return costs.scaled(lambda time: UNIT_S * time)


def _stocks(d: int, n: int) -> Iterator[Entry]:
    from benchmarks.saving_ranks import start_stock

    for memory_saving, (granularity, modules, layers) in STOCK.items():
        args = _WIDE.trained(
            recompute_granularity=granularity,
            recompute_method="uniform",
            recompute_num_layers=1,
            recompute_modules=modules,
            transformer_impl=layers,
        )
        build = built(args)
        memory = model_memory(build, 1.0, stock_recompute(args).kept)
        layer, again = memory.layers[0], recomputed_share(stock_recompute(args).kept, build)
        costs = replace(
            COSTS,
            layers=replace(COSTS.layers, stock_recompute=again),
            memory=MemoryShares(
                weight_share=1.0 if granularity is None else layer.weights / layer.full,
                kept=(memory.input if granularity == "full" else layer.kept) / layer.full,
            ),
        )
        order = make_plan(Request("1f1b", d, n, costs)).schedule
        start = partial(start_stock, order.placement, n, RANK_BYTES, RANK_BYTES // STOCK_LAYERS)
        seconds = _in_seconds(costs).on(order.placement)
        yield Entry("megatron-core", "1F1B", memory_saving, None, order, seconds, again, 0.0, start)


def _ours(d: int, n: int, limits: Sequence[float]) -> Iterator[Entry]:
    yield _of_ours(Request("v-zb", d, n, COSTS), "nothing")
    computing = sum(COSTS.layers.passes)
    for limit in limits:
        for memory_saving, (recompute, offload) in MEMORY_SAVINGS.items():
            costs = replace(COSTS, copies=HostCopies(ONE_WAY * computing if offload else 0.0))
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
                yield _of_ours(asked, memory_saving)


def _of_ours(asked: Request, memory_saving: str) -> Entry:
    from benchmarks.saving_ranks import start_ours

    plan = make_plan(asked)
    request, order = plan.request, plan.schedule
    start = start_ours(order, plan.costs, RANK_BYTES)
    name = request.schedule if request.memory_limit is None else f"{request.schedule} {request.memory_limit:g}"
    on_stages = replace(request, costs=_in_seconds(request.costs)).costs_on(order.placement)
    recomputed, offloaded = (plan.decisions.mean_savings.get(each, 0.0) for each in ("recomputed", "offloaded"))
    return Entry("ours", name, memory_saving, request.memory_limit, order, on_stages, recomputed, offloaded, start)


PART = Part("memory-saving", "Recompute and offload", measure, claims, section)
