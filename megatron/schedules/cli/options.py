"""Declares and reads the command line's flags."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from megatron.schedules.estimate.models import MODELS
from megatron.schedules.job import values
from megatron.schedules.job.flags import COMMAND_LINE, SHARED, flags_of
from megatron.schedules.job.machine import Machine
from megatron.schedules.job.plan_job import JobPlan, plan_job
from megatron.schedules.job.plans import JobPlans, job_plans
from megatron.schedules.job.spec import JobSpec, Settings
from megatron.schedules.planner.request import Request
from megatron.schedules.planner.service import Plan, make_plan
from megatron.schedules.report.progress_bar import shown
from megatron.schedules.utils.parsing import integer

Command = Callable[..., None]

# Flag of each part of a request, and of a plan's other inputs.
FLAGS = {
    **flags_of(COMMAND_LINE),
    "ranks": "--pipeline-size",
    "microbatches": "--microbatches",
    "recorded": "--recorded",
    "model": "--model",
}


def schedule_flag(*names: str, multiple: bool, more: str) -> Callable[[Command], Command]:
    """Declares ``--schedule``, given once or several times."""
    metavar, text = SHARED["schedule"]
    return click.option("--schedule", *names, metavar=metavar, multiple=multiple, help=f"{text} {more}")


def _shared(word: str, more: str) -> Callable[[Command], Command]:
    """Declares a flag that training also has. ``more`` is help text for the command line only."""
    metavar, text = SHARED[word]
    # With an explicit is_flag=False, click takes a value such as -1 for a flag.
    how: dict[str, Any] = {"metavar": metavar} if metavar else {"is_flag": True}
    return click.option(f"--{word}", help=f"{text} {more}", **how)


def size_flags(command: Command) -> Command:
    """Adds the flags that all commands share."""
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
            _shared("memory-limit", "GiB need --model; auto is for training."),
            _shared("save-memory", "GB/S needs --costs in milliseconds, and --model or a profile."),
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


def plans_of(
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
    """Reads the flags of :func:`size_flags` and describes a job for each schedule, see :func:`.plans.job_plans`.

    Raises:
        PlanError: a flag is wrong; the error names it.
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
    return job_plans(schedules, default, settings, d, n, model, FLAGS)


def plan_of(spec: JobSpec, device: float | None = None) -> JobPlan:
    """Plans ``spec``, within the memory of a device in bytes, and shows progress on standard error."""

    def make(request: Request) -> Plan:
        with shown(f"planning {spec.settings.schedule.name}", sys.stderr) as progress:
            return make_plan(request, progress)

    return plan_job(spec, Machine(device), make)
