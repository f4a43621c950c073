"""What the command line's flags ask of the planner: declared, read and checked."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from megatron.schedules.api import known_shape, profile_costs
from megatron.schedules.estimate.hardware import SHAPES
from megatron.schedules.planner.adaptive import chunk_choices
from megatron.schedules.planner.registry import AUTO, Request, check_parts, with_parts
from megatron.schedules.planner.service import Plan, make_plan
from megatron.schedules.report.progress import shown
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.decisions import Decisions
from megatron.schedules.schedule.model_loads import ModelLoads
from megatron.schedules.schedule.size_limits import check_size
from megatron.schedules.schedule.text_forms import from_csv
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.parsing import integer, number, numbers, positive, read_text

Command = Callable[..., None]

# The flag of each part of a request, and of what else a plan depends on.
FLAGS = {
    "schedule": "--schedule",
    "ranks": "--pipeline-size",
    "microbatches": "--microbatches",
    "chunks": "--chunks",
    "csv": "--schedule-file",
    "recorded": "--recorded",
    "costs": "--costs",
    "costs_file": "--costs-file",
    "model": "--model",
    "layers": "--layers",
    "shared_vocabulary": "--vocabulary-parallel",
    "memory_limit": "--memory-limit",
    "search_seconds": "--search-seconds",
    "stage_weights": "--stage-weights",
    "stage_activations": "--stage-activations",
    "weight_share": "--weight-share",
    "stock_recompute": "--recompute",
    "kept": "--kept",
    "again": "--recompute auto",
    "offload": "--offload",
    "copy": "--offload",
    "one_way": "--offload-one-way",
    "offload_shared": "--offload-shared",
    "layer_input": "--kept",
}


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
            click.option(
                "--layers",
                metavar="even|auto|N,N,...",
                help="With --model or a profile of it: how many decoder layers each stage has, in model order. auto "
                "finds the spread with which the plan is shortest, and plan says it in Megatron's letters; even "
                "without this flag.",
            ),
            click.option(
                "--vocabulary-parallel",
                is_flag=True,
                help="With --model or a profile of it: cut the output layer along the vocabulary, a part for every "
                "rank, and plan the passes S and T for it. For large vocabularies, where whole layers cannot balance "
                "the last stage.",
            ),
            click.option(
                "--costs",
                metavar="F,I,W[,COMM]",
                help="Times of forward, input gradient (the paper's B) and weight gradient over half a rank's layers, "
                "and P2P latency between ranks, in any unit (numbers from 1e-100 to 1e100); 1,1,1,0 without this flag "
                "and --model. Give measured ones: order and bubble depend on them.",
            ),
            click.option(
                "--costs-file",
                metavar="JSON",
                type=Path,
                help="A cost profile of a job (--pipeline-save-costs) or of tools/profile_passes.py, in place of "
                "--costs: times in milliseconds, those of embedding and output layer too, and the share of the "
                "memory that waits for weight gradients.",
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
                help="For adaptive and auto: the most activation memory a rank may hold, as a fraction of 1F1B's, such "
                "as 0.5; auto takes 1 without it. "
                "1F1B's is that of D microbatches, here and in what is printed, even where there are fewer. Give what "
                "your GPUs have left.",
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
                help="What an input gradient leaves to its weight gradient, as a part of the activation memory (all "
                "of it without this flag; more than 1 where gradients that wait outweigh it): give it where it was "
                "measured, and weight gradients may wait.",
            ),
            click.option(
                "--recompute",
                metavar="auto|X",
                help="auto, for adaptive: forwards may be done again in passes R of their own, on as many layers as "
                "makes the plan shortest. Give it where memory is short. A number is the part of the forward that is "
                "done again in every input gradient, as with Megatron's recompute flags: 1 for full recompute, such as "
                "the paper's 1F1B-R with --schedule 1f1b.",
            ),
            click.option(
                "--kept",
                metavar="X",
                help="The part of the activation memory that a forward leaves where the rest is recomputed, from 0 to "
                "1: some 0.06 for full recompute, and without this flag where --recompute is auto.",
            ),
            click.option(
                "--offload",
                metavar="COST|auto",
                help="For adaptive: activations may be copied to host memory and back, in passes O and L beside the "
                "computing. COST is the time to copy those of half a rank's layers one way, in the unit of --costs; "
                "auto takes what --costs-file has. Give it where memory is short and the host's link idle; with "
                "--recompute auto for both. Also for a CSV that has O and L.",
            ),
            click.option(
                "--offload-one-way",
                is_flag=True,
                help="With --offload: a rank copies in one direction at a time, not both at once. Give it where your "
                "link does.",
            ),
            click.option(
                "--offload-shared",
                metavar="K",
                help="With --offload: so many ranks share a link to the host, and each is given its even part of it "
                "all the time (1 without this flag).",
            ),
            click.option(
                "--schedule-file",
                metavar="CSV",
                type=Path,
                help="A compute-only CSV of your own, one row a rank, as torch.distributed.pipelining writes it: for "
                "an order that has no name here. Where it has R, O and L, all of those stages' layers are done again "
                "or offloaded.",
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
    """What the flags ask for, checked: schedules, a size, costs, a memory limit, and perhaps a CSV.

    Args:
        schedules: those asked for by name.
        usual: those shown where none is named, as far as what they need is given.

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
        costs_file: Path | None,
        chunks: str | None,
        memory_limit: str | None,
        search_seconds: str | None,
        stage_weights: str | None,
        stage_activations: str | None,
        weight_share: str | None,
        recompute: str | None,
        kept: str | None,
        offload: str | None,
        offload_one_way: bool,
        offload_shared: str | None,
        schedule_file: Path | None,
    ) -> None:
        d = integer("--pipeline-size", pipeline_size, 2, "a pipeline has 2 ranks or more")
        n = integer("--microbatches", microbatches, 1, "an iteration has 1 microbatch or more")
        self.chunks = integer("--chunks", chunks, 1, "a rank holds 1 chunk or more")
        self.memory_limit = positive("--memory-limit", memory_limit, "a fraction of 1F1B's activation memory")
        self.search_seconds = positive("--search-seconds", search_seconds, "a number of seconds")
        self.csv = csv = None if schedule_file is None else read_text(schedule_file, "csv")
        heeded = {
            "chunks": chunks,
            "memory_limit": memory_limit,
            "search_seconds": search_seconds,
            "csv": schedule_file,
            "again": recompute if recompute == "auto" else None,
            "offload": offload,
        }
        given = [part for part, value in heeded.items() if value is not None]
        self.names = tuple(schedules) or tuple(name for name in usual if name in with_parts(given))
        check_parts(given, self.names, FLAGS)
        if csv is not None and (d is None or n is None):
            own = from_csv(csv)
            d, n = d or own.ranks, n or own.microbatches
            if d < 2:
                raise PlanError("the CSV has one row, and a pipeline has 2 ranks or more", "csv")
        if d is None:
            raise PlanError("--pipeline-size is missing: give the number of pipeline ranks, 2 or more")
        if n is None:
            raise PlanError("--microbatches is missing: give the number of microbatches in an iteration")
        chunks_too = "" if self.chunks is None else f" and --chunks {self.chunks}"
        check_size(d, n, self.chunks, f"--pipeline-size {d} with --microbatches {n}{chunks_too}")
        self.ranks, self.microbatches = d, n
        self._again, self._offload = recompute == "auto", offload is not None
        texts = {"weight_share": weight_share, "stock_recompute": recompute, "kept": kept}
        if self._again:
            texts = {"weight_share": weight_share, "layer_input": kept}
        shares: dict[str, Any] = {
            part: number(FLAGS[part], text, "a share such as 0.5") for part, text in texts.items() if text is not None
        }
        loads = None if model is None else known_shape(model).loads
        measured = _times(costs, costs_file, d, loads)
        # What was measured of the ends goes before what is reckoned.
        loads = measured.model or loads
        if layers is not None and loads is None:
            raise PlanError(
                "--layers goes with --model, or a --costs-file with the model's ends: what does a layer cost?"
            )
        if vocabulary_parallel and loads is None:
            raise PlanError(
                "--vocabulary-parallel goes with --model, or a --costs-file with the model's ends: what does its "
                "output layer cost?"
            )
        self._partition = layers == "auto"
        self._decisions = Decisions(layers=None if layers in (None, "even", "auto") else _counts(layers))
        self.costs = replace(
            measured,
            model=loads,
            shared_vocabulary=vocabulary_parallel,
            copy=_copy_time(offload, offload_shared, offload_one_way, measured.copy),
            one_way=offload_one_way,
            stage_weights=numbers("--stage-weights", stage_weights),
            stage_activations=numbers("--stage-activations", stage_activations),
            **shares,
        )

    def request(self, name: str) -> Request:
        """Schedule ``name`` at this size, under these costs and this limit."""
        asked = Request(
            name,
            self.ranks,
            self.microbatches,
            self.costs,
            csv=self.csv,
            decisions=self._decisions,
            partition=self._partition,
        )
        if name in ("adaptive", AUTO):
            choices = chunk_choices(self.chunks or max(asked.chunk_choices))
            limit, seconds = self.memory_limit, self.search_seconds
            asked = replace(asked, chunk_choices=choices, memory_limit=limit, search_seconds=seconds)
            return replace(asked, recompute=self._again, offload=self._offload)
        return asked if self.chunks is None else replace(asked, chunks=self.chunks)

    def plan(self, name: str) -> Plan:
        """The plan of schedule ``name``. Where that takes a while, standard error says how far it is."""
        with shown(f"planning {name}", sys.stderr) as progress:
            return make_plan(self.request(name), progress)


def _copy_time(offload: str | None, shared: str | None, one_way: bool, measured: float) -> float:
    """How long copying the activations of half a rank's layers takes, one way.

    Args:
        offload, shared, one_way: the flags.
        measured: by a profile; 0 where there is none, or it does not have it.
    """
    ranks = integer("--offload-shared", shared, 1, "one rank or more share a link")
    if offload is None and (ranks is not None or one_way):
        flag = "--offload-one-way" if one_way else "--offload-shared"
        raise PlanError(f"{flag} goes with --offload: how long does a copy take?")
    if offload == "auto" and not measured:
        raise PlanError(
            "--offload auto takes the time of copies from a --costs-file that has it, as tools/profile_passes.py writes"
        )
    what = "auto, or the time to copy the activations of half a rank's layers one way,"
    time = measured if offload == "auto" else positive("--offload", offload, what)
    return measured if time is None else time * (ranks or 1)


def _counts(layers: str) -> tuple[int, ...]:
    found = numbers("--layers", layers) or ()
    if any(count != int(count) for count in found):
        raise PlanError(f"--layers {layers!r} is neither even, auto nor a list of whole numbers such as 3,4,4,3")
    return tuple(map(int, found))


def _times(costs: str | None, file: Path | None, ranks: int, loads: ModelLoads | None) -> Costs:
    if file is None and costs is None and loads is not None:
        return Costs(*loads.ratio)
    if file is None:
        return Costs.parse("1,1,1,0" if costs is None else costs)
    if costs is not None:
        raise PlanError("--costs and --costs-file both say how long passes take: give one of them")
    return profile_costs(file, ranks, loads)
