"""What the command line's flags ask of the planner: declared, read and checked."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from megatron.schedules.estimate.models import MODELS
from megatron.schedules.estimate.parallel_sizes import Sizes
from megatron.schedules.job import values
from megatron.schedules.job.flags import COMMAND_LINE, SHARED, flags_of
from megatron.schedules.job.plans import JobPlans
from megatron.schedules.job.settings import Settings
from megatron.schedules.job.spec import JobSpec
from megatron.schedules.planner.registry import check_parts, with_parts
from megatron.schedules.planner.service import Plan
from megatron.schedules.report.progress import shown
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
                help="The model: its embedding and output layer count, and without --costs so do its layers' own "
                f"F : I : W. One of {', '.join(MODELS)}, or a file with Megatron's flags, such as your script. Flags "
                "behind it are added, as in 'Llama-3-8B --seq-length 4096'. Give it to see your own bubble; stages are "
                "equal without it.",
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


def job_plans(
    schedules: Sequence[str],
    default: Sequence[str],
    *,
    model: str | None,
    pipeline_size: str | None,
    microbatches: str | None,
    layers: str | None,
    vocabulary_parallel: bool,
    costs: str | None,
    memory_limit: str | None,
    save_memory: str | None,
) -> JobPlans:
    """Reads the flags: a job for each schedule.

    Args:
        schedules: those that ``--schedule`` names.
        default: those shown where it names none, as far as the flags that they need are given.

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
        choices = [values.ScheduleChoice(name, name) for name in default if name in with_parts(settings.parts)]
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
    specs = [
        JobSpec(replace(settings, schedule=choice), Sizes(d, d), microbatches=n, csv=text)
        for choice, text in zip(choices, csvs, strict=True)
    ]
    return JobPlans(specs, model, FLAGS)


def plan_of(plans: JobPlans, spec: JobSpec) -> Plan:
    """The plan for ``spec``. Where that takes a while, standard error says how far it is."""
    with shown(f"planning {spec.settings.schedule.name}", sys.stderr) as progress:
        return plans.plan(spec, progress)
