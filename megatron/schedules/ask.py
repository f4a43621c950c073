"""What the command line's flags ask of the planner: declared, read and checked."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from megatron.schedules.planning.cost_profile import read_profile
from megatron.schedules.planning.costs import Costs
from megatron.schedules.planning.errors import PlanError
from megatron.schedules.planning.registry import NAMES, Request, Tick, plan
from megatron.schedules.planning.simulate import Timeline, simulate
from megatron.schedules.planning.store import kept_plan
from megatron.schedules.planning.textforms import from_csv

# Ranks x microbatches x chunks. More is a slip of the finger, and would take hours and all the memory there is.
_LARGEST = 1_000_000

Command = Callable[..., None]


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
                "--costs",
                metavar="F,B,W[,COMM]",
                help="Times of forward, input gradient and weight gradient over half a rank's layers, and of one hop "
                "between ranks, in any unit; 1,1,1,0 without this flag. Give measured ones: order and bubble depend on "
                "them.",
            ),
            click.option(
                "--costs-file",
                metavar="JSON",
                type=Path,
                help="A cost profile measured by tools/profile_passes.py, instead of --costs: times in milliseconds, "
                "and the share of the memory that waits for weight gradients.",
            ),
            click.option(
                "--chunks",
                metavar="V",
                help="Model chunks a rank: for interleaved-1f1b exactly (2 without this flag), for adaptive at most "
                "(4 without it). More of them shrink the bubble and multiply the messages.",
            ),
            click.option(
                "--memory-limit",
                metavar="X",
                help="For adaptive: the most activation memory a rank may hold, as a fraction of 1F1B's, such as 0.5. "
                "Give what your GPUs have left.",
            ),
            click.option(
                "--search-seconds",
                metavar="S",
                help="For adaptive: how long to search, in seconds of a usual core (without it 2 to 100, by size). "
                "Give more for a plan that will run for weeks. Counted in work, so the plan does not depend on the "
                "machine.",
            ),
            click.option(
                "--stage-weights",
                metavar="X,X,...",
                help="Where some layers take longer: the model cut into equal slices, how long each takes against the "
                "average, in model order. As many as stages, or a multiple. For an embedding or an output layer.",
            ),
            click.option(
                "--stage-activations",
                metavar="X,X,...",
                help="The same for the activation memory each slice holds.",
            ),
            click.option(
                "--weight-share",
                metavar="X",
                help="The part of the activation memory that an input gradient leaves to its weight gradient, from 0 "
                "to 1 (all of it without this flag): give it where it was measured, and weight gradients may wait.",
            ),
            click.option(
                "--recompute",
                metavar="X",
                help="The part of the forward that is done again in the input gradient, from 0 to 1: 1 for full "
                "recompute, such as the paper's 1F1B-R with --schedule 1f1b.",
            ),
            click.option(
                "--kept",
                metavar="X",
                help="The part of the activation memory that a forward leaves where the rest is recomputed, from 0 to "
                "1: some 0.06 for full recompute.",
            ),
            click.option(
                "--schedule-file",
                metavar="CSV",
                type=Path,
                help="A compute-only CSV of your own, one row a rank, as torch.distributed.pipelining writes it: for "
                "an order that has no name here.",
            ),
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


class Ask:
    """What the flags ask for, checked: a size, costs, a memory limit, and perhaps a CSV.

    Raises:
        PlanError: naming the flag that is wrong.
    """

    def __init__(
        self,
        pipeline_size: str | None,
        microbatches: str | None,
        costs: str | None,
        costs_file: Path | None,
        chunks: str | None,
        memory_limit: str | None,
        search_seconds: str | None,
        stage_weights: str | None,
        stage_activations: str | None,
        weight_share: str | None,
        recompute: str | None,
        kept: str | None,
        schedule_file: Path | None,
    ) -> None:
        d = integer("--pipeline-size", pipeline_size, 2, "a pipeline has 2 ranks or more")
        n = integer("--microbatches", microbatches, 1, "an iteration has 1 microbatch or more")
        self.chunks = integer("--chunks", chunks, 1, "a rank holds 1 chunk or more")
        self.memory_limit = _positive("--memory-limit", memory_limit, "a fraction of 1F1B's activation memory")
        self.search_seconds = _positive("--search-seconds", search_seconds, "a number of seconds")
        self.csv = csv = None if schedule_file is None else _read(schedule_file)
        if csv is not None and (d is None or n is None):
            own = named("--schedule-file", lambda: from_csv(csv))
            d, n = d or own.ranks, n or own.microbatches
        if d is None:
            raise PlanError("--pipeline-size is missing: give the number of pipeline ranks, 2 or more")
        if n is None:
            raise PlanError("--microbatches is missing: give the number of microbatches in an iteration")
        self.costs = replace(
            _times(costs, costs_file, d),
            stage_weights=_by_stage("--stage-weights", stage_weights),
            stage_activations=_by_stage("--stage-activations", stage_activations),
        )
        self._share("--weight-share", weight_share)
        self._share("--recompute", recompute)
        self._share("--kept", kept)
        if d * n * (self.chunks or 1) > _LARGEST:
            raise PlanError(
                f"--pipeline-size {d} with --microbatches {n} is too large to plan: "
                f"ranks x microbatches x chunks may be {_LARGEST} at most"
            )
        self.ranks, self.microbatches = d, n

    def _share(self, flag: str, text: str | None) -> None:
        if text is not None:
            share: dict[str, Any] = {flag[2:].replace("-", "_"): _number(flag, text, "a share from 0 to 1")}
            self.costs = named(flag, lambda: replace(self.costs, **share))

    def known(self, name: str) -> None:
        """Raise for a name that no schedule has, or that lacks its CSV or its memory limit."""
        if name not in NAMES or (name == "file" and self.csv is None):
            named("--schedule", lambda: plan(Request(name, self.ranks, self.microbatches)))
        if name == "adaptive" and self.memory_limit is None:
            raise PlanError(
                "--memory-limit is missing: adaptive needs a fraction of 1F1B's activation memory, such as 0.5"
            )

    def request(self, name: str) -> Request:
        """Schedule ``name`` at this size, under these costs and this limit."""
        self.known(name)
        asked = Request(name, self.ranks, self.microbatches, self.costs, csv=self.csv)
        if name == "adaptive":
            most = self.chunks or max(asked.chunk_choices)
            choices = {chunks for chunks in (1, 2, 4, 8, 16) if chunks <= most} | {most}
            limit, seconds = self.memory_limit, self.search_seconds
            return replace(asked, chunk_choices=tuple(sorted(choices)), memory_limit=limit, search_seconds=seconds)
        return asked if self.chunks is None else replace(asked, chunks=self.chunks)

    def timeline(self, name: str, tick: Tick = lambda share: None) -> Timeline:
        """Schedule ``name``, timed; ``tick`` hears of a search's progress."""
        schedule = kept_plan(self.request(name), tick)
        return simulate(schedule, self.costs.on(schedule.placement))


def named[T](flag: str, compute: Callable[[], T]) -> T:
    """``compute()``, its error preceded by the flag it is about."""
    try:
        return compute()
    except PlanError as error:
        raise PlanError(f"{flag}: {error}") from None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise PlanError(f"--schedule-file: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise PlanError(f"--schedule-file: {path} is not a text file; a CSV in UTF-8 is needed") from None


def _times(costs: str | None, file: Path | None, ranks: int) -> Costs:
    if file is None:
        return named("--costs", lambda: Costs.parse("1,1,1,0" if costs is None else costs))
    if costs is not None:
        raise PlanError("--costs and --costs-file both say how long passes take: give one of them")
    return named("--costs-file", lambda: read_profile(file).costs(ranks))


def integer(flag: str, text: str | None, least: int, why: str) -> int | None:
    """The number given for ``flag``, None where there is none."""
    if text is None:
        return None
    try:
        value = int(text)
    except ValueError:
        raise PlanError(f"{flag} {text!r} is not a whole number: {why}") from None
    if value < least:
        raise PlanError(f"{flag} {value} is too small: {why}")
    return value


def _number(flag: str, text: str, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise PlanError(f"{flag} {text!r} is not a number: {what} is needed")
    return value


def _positive(flag: str, text: str | None, what: str) -> float | None:
    if text is None:
        return None
    value = _number(flag, text, what)
    if value <= 0:
        raise PlanError(f"{flag} {text} is not above zero: {what} is needed")
    return value


def _by_stage(flag: str, text: str | None) -> tuple[float, ...] | None:
    if text is None:
        return None
    found = tuple(_number(flag, part, "a list such as 1.5,1,1,1.2") for part in text.split(","))
    if min(found) < 0:
        raise PlanError(f"{flag} {min(found):g} is below zero: a list such as 1.5,1,1,1.2 is needed")
    return found
