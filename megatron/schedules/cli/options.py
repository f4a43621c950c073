"""What the command line's flags ask of the planner: declared, read and checked."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import click

from megatron.schedules.estimate.device_memory import RankMemory
from megatron.schedules.estimate.models import MODELS
from megatron.schedules.job import values
from megatron.schedules.job.flags import COMMAND_LINE, SHARED, flags_of
from megatron.schedules.job.memory_limit import with_memory_limit
from megatron.schedules.job.pipelined_model import PipelinedModel
from megatron.schedules.measure.cost_profile import read_costs
from megatron.schedules.measure.custom_costs import CustomCosts
from megatron.schedules.measure.profile_facts import CopyRates, Profile, copy_time
from megatron.schedules.planner.adaptive import chunk_choices
from megatron.schedules.planner.registry import AUTO, Request, check_parts, stages, with_parts
from megatron.schedules.planner.service import Plan, make_plan
from megatron.schedules.report.progress import shown
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.decisions import Decisions
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
                f"F : I : W. One of {', '.join(MODELS)}, or a file of Megatron's flags, such as your script's. Give it "
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


class Ask:
    """What the flags ask for, checked: schedules, a size, costs, a memory limit, and perhaps CSVs.

    Args:
        schedules: those asked for.
        usual: those shown where none is asked for, as far as what they need is given.

    The others are the flags as they were given; see :func:`size_flags`.

    Raises:
        PlanError: naming the flag that is wrong.
    """

    def __init__(
        self,
        schedules: Sequence[str],
        usual: Sequence[str],
        *,
        pipeline_size: str | None,
        microbatches: str | None,
        model: str | None,
        layers: str | None,
        vocabulary_parallel: bool,
        costs: str | None,
        memory_limit: str | None,
        save_memory: str | None,
    ) -> None:
        d = integer("--pipeline-size", pipeline_size, 2, "a pipeline has 2 ranks or more")
        n = integer("--microbatches", microbatches, 1, "an iteration has 1 microbatch or more")
        asked = [values.schedule_choice("--schedule", text) for text in schedules]
        limit = values.memory_limit("--memory-limit", memory_limit)
        spread = values.layers_choice("--layers", layers)
        self._saving = values.memory_saving("--save-memory", save_memory)
        self._search_seconds = values.search_seconds()
        heeded = {"memory_limit": limit, "again": self._saving.recompute, "offload": self._saving.offload}
        given = [part for part, value in heeded.items() if value]
        if not schedules:
            asked = [values.ScheduleChoice(name, name) for name in usual if name in with_parts(given)]
        self.schedules = tuple(asked)
        self._csvs = {each.text: read_text(each.file, "csv") for each in asked if each.file is not None}
        names = [each.name for each in asked]
        check_parts([*given, *["csv"] * bool(self._csvs)], names, FLAGS)
        for text in self._csvs.values() if d is None or n is None else ():
            own = from_csv(text)
            d, n = d or own.ranks, n or own.microbatches
            if d < 2:
                raise PlanError("the CSV has one row, and a pipeline has 2 ranks or more", "csv")
        if d is None:
            raise PlanError("--pipeline-size is missing: give the number of pipeline ranks, 2 or more")
        if n is None:
            raise PlanError("--microbatches is missing: give the number of microbatches in an iteration")
        most = max((each.chunks for each in asked if each.chunks is not None), default=None)
        chunks_too = "" if most is None else f" and {most} chunks in --schedule"
        check_size(d, n, most, f"--pipeline-size {d} with --microbatches {n}{chunks_too}")
        self.ranks, self.microbatches = d, n
        self.model = None if model is None else PipelinedModel(model, d, n, shared=vocabulary_parallel)
        self._measured = _measured(costs, d, self.model)
        self.is_measured = self._measured.profile is not None
        known = self._measured.costs.model is not None or self.model is not None
        if layers is not None and not known:
            raise PlanError("--layers goes with --model, or a profile with the model's ends: what does a layer cost?")
        if vocabulary_parallel and not known:
            raise PlanError(
                "--vocabulary-parallel goes with --model, or a profile with the model's ends: what does its output "
                "layer cost?"
            )
        self._partition, self._is_shared = spread == "auto", vocabulary_parallel
        self._decisions = Decisions(layers=spread if isinstance(spread, tuple) else None)
        self._limit, custom = limit, self._measured.custom
        # Shares of memory that are given go before the model's bytes.
        self.instead_of_bytes = [] if custom is None else [FLAGS["costs"] + f" $.{name}" for name in custom.of_memory]
        self.costs = self._costs(d)
        if limit is not None and limit.is_measured:
            raise PlanError(f"--memory-limit {limit.text} is for training, which measures it: give 0.5 or 20GiB")

    def _costs(self, stages: int) -> Costs:
        """What a plan of so many stages is made for."""
        found, profile, custom = self._measured.costs, self._measured.profile, self._measured.custom
        if self.model is not None:
            found = self.model.costs(found, stages, profile, placed=self._partition)
        found = replace(found, shared_vocabulary=self._is_shared)
        if self.instead_of_bytes:
            found = replace(found, memory=None)
        return _with_copies(found if custom is None else custom.added_to(found), self._saving, self.ranks, profile)

    def request(self, schedule: values.ScheduleChoice) -> Request:
        """``schedule`` at this size, under these costs and this limit."""
        asked = Request(
            schedule.name,
            self.ranks,
            self.microbatches,
            self.costs,
            csv=self._csvs.get(schedule.text),
            decisions=self._decisions,
            partition=self._partition,
        )
        if schedule.name not in ("adaptive", AUTO):
            asked = asked if schedule.chunks is None else replace(asked, chunks=schedule.chunks)
            return replace(asked, costs=self._costs(stages(asked)))
        asked = replace(
            asked,
            chunk_choices=chunk_choices(schedule.chunks or max(asked.chunk_choices)),
            search_seconds=self._search_seconds,
            recompute=self._saving.recompute,
            offload=self._saving.offload,
        )
        asked = replace(asked, costs=self._costs(stages(asked)))
        if self._limit is None:
            return asked
        size, held = self._limit.size, _rank_bytes(asked.costs, self.ranks, self._measured.profile)
        if self.model is not None or size is None or held is None:
            message = 0.0 if self.model is None else self.model.message_bytes
            return with_memory_limit(FLAGS["memory_limit"], self._limit, asked, message)
        return replace(asked, memory_limit=size / (held * self.ranks))

    @property
    def knows_bytes(self) -> bool:
        """Whether memory is known in bytes."""
        return self.model is not None and not self.instead_of_bytes

    def memory(self, plan: Plan) -> tuple[RankMemory, ...]:
        """What each rank holds in ``plan``; nothing where that is not known in bytes."""
        return self.model.ranks(plan) if self.model is not None and self.knows_bytes else ()

    def plan(self, schedule: values.ScheduleChoice) -> Plan:
        """The plan of ``schedule``. Where that takes a while, standard error says how far it is."""
        with shown(f"planning {schedule.name}", sys.stderr) as progress:
            return make_plan(self.request(schedule), progress)


def _with_copies(costs: Costs, saving: values.MemorySaving, ranks: int, profile: Profile | None) -> Costs:
    """``costs`` with the time of a copy, which offloading needs."""
    if saving.gbps is not None:
        held = _rank_bytes(costs, ranks, profile)
        if held is None:
            raise PlanError(
                f"--save-memory offload={saving.gbps:g} needs bytes, from --model or a profile in --costs: give "
                "one of these, or offload and copy_time in a --costs FILE.json (docs/costs.md)"
            )
        time = copy_time(CopyRates(*[saving.gbps] * 3), held / 2, both_ways=True)
        return replace(costs, copy=time or 0.0)
    if saving.offload and not costs.copy:
        raise PlanError(
            "--save-memory offload takes the time of copies from --costs FILE.json: give copy_time in one written by "
            "hand (docs/costs.md), or a profile that has it, as tools/profile_passes.py writes"
        )
    return costs


def _rank_bytes(costs: Costs, ranks: int, profile: Profile | None) -> float | None:
    """Activations of a microbatch in an average rank's layers, in bytes."""
    if costs.memory is not None:
        return costs.memory.of_rank(ranks)
    return profile.layer_bytes * profile.facts.layers / ranks if profile and profile.layer_bytes else None


def _measured(text: str | None, ranks: int, model: PipelinedModel | None) -> _Measured:
    choice = values.costs_choice("--costs", text)
    usual = Costs() if model is None else model.times
    if choice is None:
        return _Measured(usual)
    if choice.file is None:
        return _Measured(choice.times or usual)
    found = read_costs(choice.file)
    if isinstance(found, CustomCosts):
        return _Measured(found.times or usual, custom=found)
    if model is not None and model.layers != found.facts.layers:
        raise PlanError(f"--model has {model.layers} layers, and {text} was measured for {found.facts.layers}")
    return _Measured(found.costs(ranks), profile=found)
