"""Dry run of a recipe: stock's schedule as the recipe sets it, ours in its place, and arguments to leave out.

Times are those of :mod:`megatron.schedules.estimate.device_costs`. Stock keeps its own CUDA graphs and its own overlap
of experts' messages; ours has what it does not have to leave out. Gains are over the better of the recipe's layers and
levelled ones, which stock can have too.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

from benchmarks.recipes.acceptance import left_out, refused
from megatron.schedules.estimate.bounds import check_bounds
from megatron.schedules.estimate.devices import GIB, SHORT
from megatron.schedules.estimate.model_build import StockRecompute
from megatron.schedules.integration.flags.arguments import completed, spec_of
from megatron.schedules.job.checks import validate
from megatron.schedules.job.machine import Machine
from megatron.schedules.job.plan_job import JobPlan, plan_job
from megatron.schedules.job.spec import JobSpec, StockFlags
from megatron.schedules.job.values import ScheduleChoice
from megatron.schedules.planner.registry import AUTO
from megatron.schedules.utils.errors import PlanError
from tools._job_specs import MOST_WITH_A_LARGER_BUBBLE, placed, stock_choice, timed, under, without

# Schedules that are tried in place of stock's, the shortest first, and the one with half of 1F1B's activation memory.
TRIED, HALF = ("v-zb", "v-half", "v-min"), "v-half"
# Microbatches of each rank with which the rules are asked.
_MICROBATCHES_A_RANK = 3
# Seconds of each search of ``auto`` on a typical core.
SEARCH_SECONDS = 0.5
# What the memory model does not know, by the argument that asks for it.
UNKNOWN = {
    "experimental_attention_variant": "the attention, counted as full attention",
    "vision_config": "the vision encoder",
}


@dataclass(frozen=True)
class Planned:
    """A planned schedule of a recipe.

    Args:
        schedule: value of the schedule's flag; for ``auto``, the schedule that it chose.
        bubble: planned share of the time in which an average rank is idle.
        gib: memory of the rank that needs most, GiB.
        activations: its activations, GiB.
        time: planned iteration time over that of stock's schedule, with the recipe's layers or levelled ones.
        layers: layers of each stage, as the flag takes them.
        recomputed: share of the layers that our schedule recomputes itself.
    """

    schedule: str
    bubble: float
    gib: float
    activations: float
    time: float = 1.0
    layers: str = ""
    recomputed: float = 0.0


class Gains(NamedTuple):
    """Parts of stock's iteration time that are spared.

    Args:
        balance: by levelled layers, which stock can have too.
        schedule: by our schedule, with stock's pass times.
        others: by hidden messages, less what is lost with CUDA graphs and stock's overlap.
        whole: what is claimed: ``schedule`` and ``others``, but little if our bubble is larger.
    """

    balance: float
    schedule: float
    others: float
    whole: float


@dataclass(frozen=True)
class Answer:
    """Answer for a recipe.

    Args:
        name: the recipe.
        gpus, device, gib: GPUs, their name, and memory of each, GiB.
        sizes: parallel sizes, as T1 C1 E64 P4 V4.
        microbatches: microbatches of an iteration.
        precision: precision of the linears.
        recompute: Megatron's recompute in the recipe; empty without.
        stock: stock's schedule.
        levelled: stock's schedule with levelled layers.
        alike: our schedule with the pass times of stock's, as if it kept stock's graphs and overlap.
        ours: our schedule: the first of those tried that fits, or the last.
        auto: what ``auto`` chose on two chunks, with the layers of ``ours``; None if it was not searched.
        half: :data:`HALF` without recompute, for a recipe with recompute.
        without: stock's schedule without recompute, for a recipe with recompute.
        left_out: arguments that have to be left out, and why.
        refused: reason why the recipe is refused also without them; empty if it is accepted.
        unknown: parts of the model that the estimate leaves out.
    """

    name: str
    gpus: int
    device: str
    gib: float
    sizes: str
    microbatches: int
    precision: str
    recompute: str = ""
    stock: Planned | None = None
    levelled: Planned | None = None
    alike: Planned | None = None
    ours: Planned | None = None
    auto: Planned | None = None
    half: Planned | None = None
    without: Planned | None = None
    left_out: dict[str, str] = field(default_factory=dict)
    refused: str = ""
    unknown: tuple[str, ...] = ()

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Answer:
        """Returns the answer in a record of a JSON file."""
        names = "stock", "levelled", "alike", "ours", "auto", "half", "without"
        planned = {name: record.get(name) and Planned(**record[name]) for name in names}
        return cls(**{**record, **planned, "unknown": tuple(record["unknown"])})

    @property
    def is_accepted(self) -> bool:
        """True if a schedule works with all of the recipe's arguments."""
        return not (self.refused or self.left_out)

    @property
    def gains(self) -> Gains | None:
        """The gain of ``ours`` over stock's schedule, in parts; None without figures."""
        stock, levelled, alike, ours = self.stock, self.levelled, self.alike, self.ours
        if stock is None or levelled is None or alike is None or ours is None:
            return None
        base = min(stock, levelled, key=lambda planned: planned.time)
        whole = 1 - ours.time
        if ours.bubble > base.bubble:
            whole = min(whole, MOST_WITH_A_LARGER_BUBBLE)
        return Gains(1 - base.time / stock.time, 1 - alike.time, alike.time - ours.time, whole)


def answer(
    name: str,
    args: argparse.Namespace,
    device: str,
    gib: float,
    tried: Sequence[str] = TRIED,
    seconds: float = SEARCH_SECONDS,
    known: Answer | None = None,
) -> Answer:
    """Dry-runs a recipe.

    Args:
        name: the recipe.
        args: its arguments, as Megatron's parser returns them.
        device, gib: the GPU, and its memory.
        tried: our schedules, at least one.
        seconds: time of each search of ``auto`` on a typical core; 0 to leave it out.
        known: an earlier answer whose arguments to leave out stay; None to ask the rules.

    Raises:
        PlanError: the arguments cannot be read, or stock's schedule cannot be planned.
    """
    spec, chunks = _read(args, gib)
    # A plan does not depend on them. Their rules are asked below.
    plain, gpu = replace(spec, stock=StockFlags()), SHORT[device]
    of_stock = timed(plain, gpu, stock=True)
    stock, is_as_set = _stock(of_stock, chunks)
    for each in tried:
        alike = _planned(placed(of_stock, ScheduleChoice(each, each)))
        if alike.fits(gib * GIB):
            break
    found = Answer(
        name,
        args.world_size,
        device,
        gib,
        _sizes(spec, chunks),
        stock.request.microbatches,
        _precision(spec, args),
        unknown=(
            *(said for argument, said in UNKNOWN.items() if getattr(args, argument, None)),
            *([] if is_as_set else ["stock's layers, which do not divide over the recipe's stages"]),
        ),
    )
    if known is None:
        found = replace(found, **_acceptance(spec, alike))
    else:
        found = replace(found, refused=known.refused, left_out=known.left_out)
    named = ScheduleChoice(each, each)
    of_ours = timed(replace(without(spec, found.left_out), stock=StockFlags()), gpu)
    levelled = _planned(placed(of_stock, stock_choice(chunks)))
    base = min((stock, levelled), key=lambda job: job.plan.iteration_time)
    found = replace(
        found,
        recompute=_recompute(spec.recompute),
        stock=_figures(stock, base),
        levelled=_figures(levelled, base),
        alike=_figures(alike, base),
        ours=_figures(_planned(placed(of_ours, named)), base),
    )
    if seconds and not found.refused:
        found = replace(found, auto=_figures(_auto(timed(without(spec, found.left_out), gpu), seconds), base))
    if not found.recompute:
        return found
    nothing = StockRecompute()
    return replace(
        found,
        without=_figures(_stock(replace(of_stock, recompute=nothing), chunks)[0], base),
        half=_figures(_planned(placed(replace(of_ours, recompute=nothing), ScheduleChoice(HALF, HALF))), base),
    )


def with_acceptance(known: Answer, args: argparse.Namespace) -> Answer:
    """Returns ``known`` with what the rules now say about the recipe's arguments. Its plans stay.

    If a plan of ``auto`` recomputes and other arguments than before are left out, it is dropped: rules about
    recompute may refuse it.

    Args:
        known: an answer of :func:`answer`.
        args: the recipe's arguments.

    Raises:
        PlanError: the arguments cannot be read.
    """
    name = TRIED[0] if known.ours is None else known.ours.schedule
    found = replace(known, **_asked(_read(args, known.gib)[0], name))
    is_stale = found.auto is not None and found.auto.recomputed > 0 and found.left_out != known.left_out
    return replace(found, auto=None) if is_stale else found


def _read(args: argparse.Namespace, gib: float) -> tuple[JobSpec, int]:
    """Returns the job, and its chunks of a rank under stock's schedule."""
    chunks = getattr(args, "virtual_pipeline_model_parallel_size", None) or _chunks(args) or 1
    args.num_layers_per_virtual_pipeline_stage = args.num_virtual_stages_per_pipeline_rank = None
    args.pipeline_schedule, args.pipeline_dry_run = "1f1b", f"{args.world_size}x{gib:g}GiB"
    check_bounds(args)
    spec = completed(spec_of(args), args)
    validate(spec)
    return spec, chunks


def stock_job(args: argparse.Namespace, gib: float) -> tuple[JobSpec, int, dict[str, str]]:
    """Returns a recipe's job, its chunks of a rank under stock's schedule, and what our schedules leave out of it.

    Args:
        args: the recipe's arguments.
        gib: memory of its GPU.

    Raises:
        PlanError: the arguments cannot be read, or no schedule of ours works with them.
    """
    spec, chunks = _read(args, gib)
    asked = _asked(spec, TRIED[0])
    if asked["refused"]:
        raise PlanError(f"no schedule of ours works with it: {asked['refused']}")
    return spec, chunks, asked["left_out"]


def _asked(spec: JobSpec, name: str) -> dict[str, Any]:
    """Asks the rules about a recipe under a schedule. They read the order of passes, which repeats itself."""
    sizes, micro = spec.sizes, spec.batch.micro or 1
    samples = _MICROBATCHES_A_RANK * sizes.pipeline * micro * (sizes.world // sizes.of_replica)
    few = replace(spec, batch=replace(spec.batch, whole=samples, steps=None), stock=StockFlags())
    return _acceptance(spec, _planned(placed(few, ScheduleChoice(name, name))))


def _acceptance(spec: JobSpec, ours: JobPlan) -> dict[str, Any]:
    why = refused(spec, ours)
    return {"refused": why, "left_out": {} if why else left_out(spec, ours)}


def _chunks(args: Any) -> int | None:
    each = args.num_layers_per_virtual_pipeline_stage
    if each:
        return int(args.num_layers // (args.pipeline_model_parallel_size * each))
    return args.num_virtual_stages_per_pipeline_rank


@lru_cache(maxsize=256)
def _planned(spec: JobSpec) -> JobPlan:
    dry_run = spec.settings.dry_run
    return plan_job(spec, Machine(None if dry_run is None else dry_run.device_bytes))


def _auto(spec: JobSpec, seconds: float) -> JobPlan:
    """Plans ``auto`` on two chunks of each rank, with the layers from which a search would start."""
    return _planned(placed(spec, ScheduleChoice(AUTO, AUTO), search_seconds=seconds))


def _stock(spec: JobSpec, chunks: int) -> tuple[JobPlan, bool]:
    """Plans stock's schedule. Returns whether its layers are the recipe's; otherwise they are :func:`placed`."""
    choice = stock_choice(chunks)
    try:
        return _planned(under(spec, choice)), True
    except PlanError:
        return _planned(placed(spec, choice)), False


def _figures(job: JobPlan, stock: JobPlan | None = None) -> Planned:
    """Figures of a planned job, as its dry run gives them."""
    timeline, worst = job.plan.timeline, job.memory[job.worst]
    chosen = job.schedule.name if job.spec.settings.schedule.name == AUTO else job.spec.settings.schedule.text
    return Planned(
        chosen,
        round(timeline.bubble, 4),
        round(worst.device / GIB, 1),
        round(worst.activations / GIB, 1),
        1.0 if stock is None else round(timeline.makespan / stock.plan.iteration_time, 3),
        ",".join(map(str, job.layers)),
        round(job.request.decisions.mean_savings.get("recomputed", 0.0), 3),
    )


def _sizes(spec: JobSpec, chunks: int) -> str:
    sizes = spec.sizes
    each = {"T": sizes.tensor, "C": sizes.context, "E": sizes.expert, "P": sizes.pipeline, "V": chunks}
    return " ".join(f"{letter}{size}" for letter, size in each.items() if size > 1)


def _precision(spec: JobSpec, args: Any) -> str:
    if "fp4" in spec.stock.given:
        return "nvfp4"
    return f"fp8 {spec.stock.fp8_recipe}" if spec.stock.fp8_recipe else "bf16" if args.bf16 else "fp32"


def _recompute(recompute: StockRecompute) -> str:
    return (
        ", ".join(recompute.modules or ("core_attn",))
        if recompute.granularity == "selective"
        else recompute.granularity or ""
    )
