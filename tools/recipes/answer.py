"""Dry run of a recipe: stock's schedule as the recipe sets it, ours in its place, and arguments to leave out."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from megatron.schedules.estimate.bounds import check_bounds
from megatron.schedules.estimate.model_build import StockRecompute, rank_memory
from megatron.schedules.estimate.times import loads
from megatron.schedules.integration.flags.check import PlannedJob, planned_job, validate
from megatron.schedules.integration.flags.incompatible import refusal
from megatron.schedules.integration.flags.reader import completed, spec_of
from megatron.schedules.job.spec import JobSpec, StockFlags
from megatron.schedules.job.values import ScheduleChoice
from megatron.schedules.planner.layer_partition import levelled
from megatron.schedules.planner.registry import placement
from megatron.schedules.planner.request import Request
from megatron.schedules.schedule.simulator import Timeline, simulate
from megatron.schedules.utils.errors import PlanError

# Schedules that are tried in place of stock's, the shortest first, and the one with half of 1F1B's activation memory.
TRIED, HALF = ("v-zb", "v-half", "v-min"), "v-half"
_GIB = 2.0**30
# Arguments without which a recipe would be another model, or in another precision. All others can be left out.
_KEPT = frozenset(
    (
        "fp4",
        "fp8",
        "fp4_quantizer_factory",
        "hybrid_layer_pattern",
        "kitchen_config_file",
        "kitchen_recipe_number",
        "recompute_granularity",
    )
    + ("sft", "te_precision_config_file", "use_megatron_fsdp", "use_torch_fsdp2", "yaml_cfg")
)
# What the memory model does not know, by the argument that asks for it. With the first ones no figures are given.
_NO_FIGURES = {
    "enable_hyper_connections": "hyper-connections",
    "hybrid_layer_pattern": "layers other than attention and MLP",
    "peft": "adapters",
}
_UNKNOWN = {
    **_NO_FIGURES,
    "experimental_attention_variant": "the attention, counted as full attention",
    "vision_config": "the vision encoder",
}


@dataclass(frozen=True)
class Planned:
    """A planned schedule of a recipe.

    Args:
        schedule: value of the schedule's flag.
        bubble: planned share of the time in which an average rank is idle.
        gib: memory of the rank that needs most, GiB.
        activations: its activations, GiB.
        time: planned iteration time over that of stock's schedule.
    """

    schedule: str
    bubble: float
    gib: float
    activations: float
    time: float = 1.0


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
        ours: our schedule: the first of those tried that fits, or the last.
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
    ours: Planned | None = None
    half: Planned | None = None
    without: Planned | None = None
    left_out: dict[str, str] = field(default_factory=dict)
    refused: str = ""
    unknown: tuple[str, ...] = ()

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Answer:
        """Returns the answer in a record of a JSON file."""
        planned = {name: record[name] and Planned(**record[name]) for name in ("stock", "ours", "half", "without")}
        return cls(**{**record, **planned, "unknown": tuple(record["unknown"])})

    @property
    def is_accepted(self) -> bool:
        """True if a schedule works with all of the recipe's arguments."""
        return not (self.refused or self.left_out)


def answer(name: str, args: argparse.Namespace, device: str, gib: float, tried: Sequence[str] = TRIED) -> Answer:
    """Dry-runs a recipe.

    Args:
        name: the recipe.
        args: its arguments, as Megatron's parser returns them.
        device, gib: the GPU, and its memory.
        tried: our schedules, at least one.

    Raises:
        PlanError: the arguments cannot be read, or stock's schedule cannot be planned.
    """
    chunks = getattr(args, "virtual_pipeline_model_parallel_size", None) or _chunks(args) or 1
    args.num_layers_per_virtual_pipeline_stage = args.num_virtual_stages_per_pipeline_rank = None
    args.pipeline_schedule, args.pipeline_dry_run = "1f1b", f"{args.world_size}x{gib:g}GiB"
    check_bounds(args)
    spec = completed(spec_of(args), args)
    validate(spec)
    # A plan does not depend on them. Their rules are asked below.
    plain = replace(spec, stock=StockFlags())
    stock, is_as_set = _stock(plain, chunks)
    for each in tried:
        ours = _planned(_placed(plain, ScheduleChoice(each, each)))
        if _figures(ours).gib <= gib:
            break
    kept = replace(spec.stock, given=spec.stock.given & _KEPT)

    def why_not(stock: StockFlags) -> str:
        return refusal(replace(ours.spec, stock=stock), ours.schedule)

    left_out = {each: why_not(replace(kept, given=kept.given | {each})) for each in sorted(spec.stock.given - _KEPT)}
    found = Answer(
        name,
        args.world_size,
        device,
        gib,
        _sizes(spec, chunks),
        stock.request.microbatches,
        _precision(spec, args),
        _recompute(spec.recompute),
        _figures(stock),
        _figures(ours, stock),
        refused=why_not(kept),
        unknown=(
            *(said for argument, said in _UNKNOWN.items() if getattr(args, argument, None)),
            *([] if is_as_set else ["stock's layers, which do not divide over the recipe's stages"]),
        ),
    )
    if any(getattr(args, argument, None) for argument in _NO_FIGURES):
        found = replace(found, stock=None, ours=None, recompute="")
    if not found.refused:
        found = replace(found, left_out={argument: why for argument, why in left_out.items() if why})
    if not found.recompute:
        return found
    without = StockRecompute()
    return replace(
        found,
        without=_figures(_stock(replace(plain, recompute=without), chunks)[0], stock),
        half=_figures(_planned(_placed(replace(plain, recompute=without), ScheduleChoice(HALF, HALF))), stock),
    )


def _chunks(args: Any) -> int | None:
    each = args.num_layers_per_virtual_pipeline_stage
    if each:
        return int(args.num_layers // (args.pipeline_model_parallel_size * each))
    return args.num_virtual_stages_per_pipeline_rank


@lru_cache(maxsize=256)
def _planned(spec: JobSpec) -> PlannedJob:
    return planned_job(spec, quiet=True)


def _placed(spec: JobSpec, choice: ScheduleChoice) -> JobSpec:
    """Returns ``spec`` under a schedule, with the layers from which a search would start. Searches take minutes."""
    request = Request(choice.name, spec.sizes.pipeline, 1, chunks=choice.chunks or 2)
    where, build = placement(request), spec.build
    layers = "auto" if where is None or build is None else levelled(loads(build), where)
    free = replace(spec, layers=replace(spec.layers, first=None, last=None, layout=None, stand_in=(False, False)))
    return _under(free, choice, layers=layers)


def _under(spec: JobSpec, choice: ScheduleChoice, **settings: Any) -> JobSpec:
    spec = spec.under(choice.name, **settings)
    return replace(spec, settings=replace(spec.settings, schedule=choice))


def _stock(spec: JobSpec, chunks: int) -> tuple[PlannedJob, bool]:
    """Plans stock's schedule. Returns whether its layers are the recipe's; otherwise they are :func:`_placed`."""
    name = "1f1b" if chunks == 1 else "interleaved-1f1b"
    choice = ScheduleChoice(name, name) if chunks == 1 else ScheduleChoice(f"{name}:{chunks}", name, chunks)
    try:
        return _planned(_under(spec, choice)), True
    except PlanError:
        return _planned(_placed(spec, choice)), False


@lru_cache(maxsize=16)
def _timeline(job: PlannedJob) -> Timeline:
    return simulate(job.schedule, job.request.costs_on(job.schedule.placement))


def _figures(job: PlannedJob, stock: PlannedJob | None = None) -> Planned:
    """Figures of a planned job, with as many messages as ``megatron-schedules compare`` counts."""
    timeline = _timeline(job)
    assert job.spec.trained is not None, "the model is known"
    worst = max(rank_memory(job.spec.trained, job.schedule, timeline.costs, job.request), key=lambda rank: rank.device)
    return Planned(
        job.spec.settings.schedule.text,
        round(timeline.bubble, 4),
        round(worst.device / _GIB, 1),
        round(worst.activations / _GIB, 1),
        1.0 if stock is None else round(timeline.makespan / _timeline(stock).makespan, 3),
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
