"""What the command line's flags ask of the planner: declared, read and checked."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import click

from megatron.schedules.estimate import megatron_flags
from megatron.schedules.estimate.hardware import SHAPES
from megatron.schedules.estimate.shape import Shape
from megatron.schedules.job import values
from megatron.schedules.job.flags import COMMAND_LINE, SHARED, flags_of
from megatron.schedules.job.settings import Settings
from megatron.schedules.job.spec import JobSpec, Sizes
from megatron.schedules.measure.cost_profile import read_costs
from megatron.schedules.measure.custom_costs import CustomCosts
from megatron.schedules.measure.profile_facts import CopyRates, Profile, copy_time
from megatron.schedules.planner.adaptive import chunk_choices
from megatron.schedules.planner.plan_cache import kept_plan, kept_relief, kept_spread
from megatron.schedules.planner.registry import Request, check_parts, with_own_relief, with_parts
from megatron.schedules.report.progress import shown
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.model_loads import ModelLoads
from megatron.schedules.schedule.simulator import Timeline, simulate
from megatron.schedules.schedule.size_limits import check_size
from megatron.schedules.schedule.text_forms import from_csv
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.parsing import integer, read_text

Command = Callable[..., None]

# The flag of each part of a request, and of what else a plan depends on.
FLAGS = {
    **flags_of(COMMAND_LINE),
    "ranks": "--pipeline-size",
    "microbatches": "--microbatches",
    "recorded": "--recorded",
    "model": "--model",
}


def schedule_flag(*names: str, multiple: bool, more: str) -> Callable[[Command], Command]:
    """``--schedule``, once or several times."""
    metavar, text = SHARED["schedule"]
    return click.option("--schedule", *names, metavar=metavar, multiple=multiple, help=f"{text} {more}")


def _shared(word: str, more: str) -> Callable[[Command], Command]:
    """A flag that training has too, with what holds for the command line alone."""
    metavar, text = SHARED[word]
    # Click would take a value such as -1 for a flag where is_flag is given as False.
    how: dict[str, Any] = {"metavar": metavar} if metavar else {"is_flag": True}
    return click.option(f"--{word}", help=f"{text} {more}", **how)


def size_flags(command: Command) -> Command:
    """The flags every command has: what is planned, and where the result goes."""
    for flag in reversed(
        (
            click.option(
                "--pipeline-size",
                metavar="D",
                help="Pipeline ranks, 2 or more: what Megatron calls --pipeline-model-parallel-size. May be left out "
                "where a CSV says it.",
            ),
            click.option(
                "--microbatches",
                metavar="N",
                help="Microbatches of one iteration: global batch / (micro batch x data-parallel size). May be left "
                "out where a CSV says it.",
            ),
            click.option(
                "--model",
                metavar="NAME|FILE",
                help="What is trained: its embedding and output layer count, and without --costs so do its layers' own "
                f"F : I : W. One of {', '.join(SHAPES)}, or a file of Megatron's flags, such as your script's. Give it "
                "to see your own bubble; equal stages without it.",
            ),
            _shared("layers", "Needs --model or a profile of it. plan prints the result in Megatron's letters."),
            _shared("vocabulary-parallel", "Needs --model or a profile of it."),
            _shared("costs", "1,1,1,0 without this flag and --model."),
            _shared("memory-limit", "GiB need a cost profile; auto is for training."),
            _shared("save-memory", "GB/S needs a cost profile."),
            click.option(
                "--output",
                metavar="FILE",
                type=Path,
                help="Write here rather than to the terminal. A file that exists is overwritten.",
            ),
        )
    ):
        command = flag(command)
    return command


class _Measured(NamedTuple):
    """Costs as far as ``--costs`` says them.

    Args:
        costs: before what other flags say.
        profile: the measured file.
        custom: the file written by hand.
    """

    costs: Costs
    profile: Profile | None = None
    custom: CustomCosts | None = None


def specs_of(
    schedules: Sequence[str],
    usual: Sequence[str],
    *,
    pipeline_size: str | None,
    microbatches: str | None,
    layers: str | None,
    vocabulary_parallel: bool,
    costs: str | None,
    memory_limit: str | None,
    save_memory: str | None,
) -> tuple[JobSpec, ...]:
    """Reads the flags: a job for each schedule.

    Args:
        schedules: those asked for.
        usual: those shown where none is asked for, as far as what they need is given.

    The others are the flags as they were given; see :func:`size_flags`.

    Raises:
        PlanError: naming the flag that is wrong.
    """
    d = integer("--pipeline-size", pipeline_size, 2, "a pipeline has 2 ranks or more")
    n = integer("--microbatches", microbatches, 1, "an iteration has 1 microbatch or more")
    settings = Settings(
        values.ScheduleChoice("", ""),
        values.memory_limit("--memory-limit", memory_limit),
        values.costs_choice("--costs", costs),
        values.layers_choice("--layers", layers),
        values.memory_saving("--save-memory", save_memory),
        vocabulary_parallel,
        search_seconds=values.search_seconds(),
    )
    choices = [values.schedule_choice("--schedule", text) for text in schedules]
    if not schedules:
        choices = [values.ScheduleChoice(name, name) for name in usual if name in with_parts(settings.parts)]
    csvs = [None if choice.file is None else read_text(choice.file, "csv") for choice in choices]
    check_parts(
        [*settings.parts, *["csv"] * any(text is not None for text in csvs)], [choice.name for choice in choices], FLAGS
    )
    for text in csvs if d is None or n is None else ():
        if text is not None:
            own = from_csv(text)
            d, n = d or own.ranks, n or own.microbatches
            if d < 2:
                raise PlanError("the CSV has one row, and a pipeline has 2 ranks or more", "csv")
    if d is None:
        raise PlanError("--pipeline-size is missing: give the number of pipeline ranks, 2 or more")
    if n is None:
        raise PlanError("--microbatches is missing: give the number of microbatches in an iteration")
    most = max((choice.chunks for choice in choices if choice.chunks is not None), default=None)
    chunks_too = "" if most is None else f" and {most} chunks in --schedule"
    check_size(d, n, most, f"--pipeline-size {d} with --microbatches {n}{chunks_too}")
    return tuple(
        JobSpec(replace(settings, schedule=choice), Sizes(d, d), microbatches=n, csv=text)
        for choice, text in zip(choices, csvs, strict=True)
    )


class Ask:
    """Jobs and what they cost, and their plans.

    Args:
        schedules, usual: see :func:`specs_of`.
        model: the flag of that name.
        flags: the others.

    Raises:
        PlanError: naming the flag that is wrong.
    """

    def __init__(self, schedules: Sequence[str], usual: Sequence[str], *, model: str | None, **flags: Any) -> None:
        self.specs = specs_of(schedules, usual, **flags)
        settings, self.ranks = self.specs[0].settings, self.specs[0].sizes.pipeline
        self.microbatches = self.specs[0].microbatches or 1
        self.planned: dict[str, Request] = {}  # with layers placed and relief settled
        loads = None if model is None else _shape(model).loads
        measured = _measured(settings.costs, self.ranks, loads)
        self.is_measured = measured.profile is not None
        # What was measured of the ends goes before what is reckoned.
        loads = measured.costs.model or loads
        for flag, is_given, what in (
            ("--layers", settings.layers != "even", "a layer"),
            ("--vocabulary-parallel", settings.vocabulary_parallel, "its output layer"),
        ):
            if is_given and loads is None:
                raise PlanError(f"{flag} goes with --model, or a profile with the model's ends: what does {what} cost?")
        self._memory_limit = _fraction(settings.memory_limit, measured.profile)
        found = replace(
            measured.costs,
            model=loads,
            layers=settings.layers if isinstance(settings.layers, tuple) else None,
            shared_vocabulary=settings.vocabulary_parallel,
        )
        found = found if measured.custom is None else measured.custom.added_to(found)
        self.costs = _with_copies(found, settings.saving, self.ranks, measured.profile)

    def request(self, spec: JobSpec) -> Request:
        """What ``spec`` asks of the planner, under these costs."""
        settings, chunks = spec.settings, spec.settings.schedule.chunks
        asked = Request(settings.schedule.name, self.ranks, self.microbatches, self.costs, csv=spec.csv)
        if asked.schedule == "adaptive":
            return replace(
                asked,
                chunk_choices=chunk_choices(chunks or max(asked.chunk_choices)),
                memory_limit=self._memory_limit,
                search_seconds=settings.search_seconds,
                recompute=settings.saving.recompute,
                offload=settings.saving.offload,
            )
        return with_own_relief(asked if chunks is None else replace(asked, chunks=chunks))

    def timeline(self, spec: JobSpec) -> Timeline:
        """The plan for ``spec``, timed. Where that takes a while, standard error says how far it is."""
        request, choice = self.request(spec), spec.settings.schedule
        if spec.settings.layers == "auto":
            with shown(f"placing layers for {choice.name}", sys.stderr) as progress:
                request = kept_spread(request, progress)
        if request.recompute or request.offload:
            with shown(f"choosing what to relieve in {choice.name}", sys.stderr) as progress:
                request = kept_relief(request, progress)
        with shown(f"planning {choice.name}", sys.stderr) as progress:
            found = kept_plan(request, progress)
        self.planned[choice.text] = request
        return simulate(found, request.costs.on(found.placement))


def _fraction(limit: values.MemoryLimit | None, profile: Profile | None) -> float | None:
    """``limit`` as a fraction of 1F1B's activation memory."""
    if limit is None:
        return None
    if limit.is_measured:
        raise PlanError(f"--memory-limit {limit.text} is for training, which measures it: give a fraction such as 0.5")
    if limit.size is None:
        return limit.fraction
    if profile is None or not profile.layer_bytes:
        raise PlanError(f"--memory-limit {limit.text} needs a profile in --costs that counted bytes: give a fraction")
    return limit.size / (profile.layer_bytes * profile.facts.layers)


def _with_copies(costs: Costs, saving: values.MemorySaving, ranks: int, profile: Profile | None) -> Costs:
    """``costs`` with the time of a copy, which offloading needs."""
    if saving.gbps is not None:
        if profile is None or not profile.layer_bytes:
            raise PlanError(
                f"--save-memory offload={saving.gbps:g} needs bytes, from a cost profile in --costs: give that, or "
                "offload and copy_time in a --costs FILE.json (docs/costs.md)"
            )
        held = profile.layer_bytes * profile.facts.layers / (2 * ranks)
        time = copy_time(CopyRates(*[saving.gbps] * 3), held, both_ways=True)
        return replace(costs, copy=time or 0.0)
    if saving.offload and not costs.copy:
        raise PlanError(
            "--save-memory offload takes the time of copies from --costs FILE.json: give copy_time in one written by "
            "hand (docs/costs.md), or a profile that has it, as tools/profile_passes.py writes"
        )
    return costs


def _shape(model: str) -> Shape:
    if model in SHAPES:
        return SHAPES[model]
    if not os.path.exists(model):  # Path.exists would raise for a name that is too long
        close = difflib.get_close_matches(model, SHAPES, n=1, cutoff=0.4)
        hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(SHAPES)}"
        raise PlanError(f"{model!r} is neither a model known by name nor a file: {hint}", "model")
    return megatron_flags.read(Path(model))


def _measured(choice: values.CostsChoice | None, ranks: int, loads: ModelLoads | None) -> _Measured:
    usual = Costs() if loads is None else Costs(*loads.ratio)
    if choice is None:
        return _Measured(usual)
    if choice.file is None:
        return _Measured(choice.times or usual)
    found = read_costs(choice.file)
    if isinstance(found, CustomCosts):
        return _Measured(found.times or usual, custom=found)
    if loads is not None and len(loads.layers) != found.facts.layers:
        raise PlanError(
            f"--model has {len(loads.layers)} layers, and {choice.text} was measured for {found.facts.layers}"
        )
    return _Measured(found.costs(ranks), profile=found)
