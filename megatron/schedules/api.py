"""Plans from Python, without torch: see docs/python-api.md.

``import megatron.schedules as ms`` brings :func:`plan` and :func:`compare`; what they need is imported when they are
called first.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.schedules.estimate import megatron_flags
from megatron.schedules.estimate.hardware import SHAPES
from megatron.schedules.estimate.shape import Shape
from megatron.schedules.measure.cost_profile import read_profile
from megatron.schedules.planner import service
from megatron.schedules.planner.adaptive import chunk_choices
from megatron.schedules.planner.registry import AUTO, NAMES, check_parts, heeds, with_parts
from megatron.schedules.planner.request import Request
from megatron.schedules.report.drawing import drawn, of_plans
from megatron.schedules.report.figures import counted, figures, percent
from megatron.schedules.report.table import Row, as_records
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.decisions import Decisions
from megatron.schedules.schedule.model_loads import ModelLoads
from megatron.schedules.schedule.size_limits import check_size
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.parsing import read_text
from megatron.schedules.utils.progress import Progress, unheard

__all__ = ["Plan", "PlanError", "compare", "plan"]

# A larger drawing makes a notebook slow.
_MOST_DRAWN = 4_000
# The parts of a request that not all schedules have, and the arguments that say them.
_OF_SOME = {
    "memory_limit": "memory_limit",
    "search_seconds": "search_seconds",
    "chunks": "chunks",
    "again": "recompute",
    "offload": "offload",
    "csv": "schedule_file",
}
# The argument of each part of a request, of costs and of decisions.
_NAMES = {
    **{name: name for name in ("schedule", "microbatches", "costs", "model", "layers")},
    **_OF_SOME,
    "ranks": "pipeline_size",
    "costs_file": "costs",
    "shared_vocabulary": "vocabulary_parallel",
    "copy": "offload",
}


class Plan(service.Plan):
    """A plan; in a notebook it shows its drawing."""

    def __repr__(self) -> str:
        schedule = self.schedule
        return (
            f"<plan {schedule.name}: {counted(schedule.ranks, 'rank')}, "
            f"{counted(schedule.microbatches, 'microbatch')}, bubble {percent(self.bubble)}, "
            f"{percent(self.peak_memory, 1)} of 1F1B's activation memory>"
        )

    def _repr_svg_(self) -> str | None:
        """The drawing; None where it is too large for a notebook, which then shows the text."""
        drawing = of_plans([self.timeline], repr(self)[1:-1] + ".", "")
        return drawn(drawing, "svg") if drawing.passes <= _MOST_DRAWN else None


def plan(
    schedule: str,
    *,
    pipeline_size: int,
    microbatches: int,
    memory_limit: float | None = None,
    costs: Costs | Sequence[float] | str | Path | None = None,
    model: str | Path | None = None,
    layers: str | Sequence[int] | None = None,
    chunks: int | None = None,
    recompute: bool = False,
    offload: float | bool = False,
    vocabulary_parallel: bool = False,
    schedule_file: str | Path | None = None,
    search_seconds: float | None = None,
    progress: Progress = unheard,
) -> Plan:
    """Plans one schedule.

    Args:
        schedule: the name of a schedule, or ``auto`` for the shortest of all within the memory limit.
        pipeline_size: pipeline ranks, 2 or more.
        microbatches: of one iteration.
        memory_limit: for ``adaptive`` and ``auto``, the most activation memory of a rank, as a fraction of 1F1B's.
        costs: F, I, W and optionally P2P latency of half a rank's layers, or a file of measured ones; without it the
            model's arithmetic, or equal times.
        model: a name such as ``Llama-3-8B``, or a file of Megatron's flags.
        layers: decoder layers of each stage, ``even``, or ``auto`` for the shortest plan. ``auto`` schedules search
            them without it.
        chunks: of a rank: exactly so many for ``interleaved-1f1b``, at most for ``adaptive`` and ``auto``.
        recompute: whether layers may be recomputed in passes R, for ``adaptive`` and ``auto``.
        offload: the time to copy the activations of half a rank's layers to the host, one way; or True for the time
            that the cost file has.
        vocabulary_parallel: whether all ranks share the output layer.
        schedule_file: a compute-only CSV, for ``file``.
        search_seconds: for ``adaptive`` and ``auto``, how long to search, in seconds of a usual core.
        progress: told what share of the planning has been done since it was told last.

    Raises:
        PlanError: in one line, which argument is wrong and what would work.
    """
    with _by_argument():
        _check_whole(pipeline_size=pipeline_size, microbatches=microbatches, chunks=chunks)
        _check_numbers(memory_limit=memory_limit, search_seconds=search_seconds, offload=offload)
        said = (memory_limit, search_seconds, chunks, recompute or None, offload or None, schedule_file)
        given = [part for part, value in zip(_OF_SOME, said, strict=True) if value is not None]
        check_parts(given, [schedule], _NAMES)
        check_size(pipeline_size, microbatches, chunks, f"{pipeline_size} ranks with {microbatches} microbatches")
        ranks = pipeline_size
        text = None if schedule_file is None else read_text(Path(schedule_file), "csv")
        loads = None if model is None else known_shape(str(model)).loads
        found = _costs(costs, ranks, loads)
        if (layers is not None or vocabulary_parallel) and found.model is None:
            about = "layers" if layers is not None else "shared_vocabulary"
            raise PlanError("needs the model, or a cost file that has it: what does a layer cost?", about)
        if offload is True and not found.copy:
            raise PlanError("True takes the time of copies from a cost file that has it: give a time", "offload")
        copy = found.copy if isinstance(offload, bool) else offload
        searched = schedule in ("adaptive", AUTO)
        request = Request(
            schedule,
            ranks,
            microbatches,
            replace(found, shared_vocabulary=vocabulary_parallel, copy=copy),
            csv=text,
            memory_limit=memory_limit,
            search_seconds=search_seconds,
            decisions=Decisions(layers=_layers(layers)),
            partition=layers == "auto",
            recompute=recompute,
            offload=searched and bool(offload),
        )
        if searched:
            request = replace(request, chunk_choices=chunk_choices(chunks or max(request.chunk_choices)))
        elif chunks is not None:
            request = replace(request, chunks=chunks)
        made = service.make_plan(request, progress)
    return Plan(made.asked, made.request, made.schedule)


def compare(schedules: Collection[str] = (), **arguments: Any) -> list[dict[str, object]]:
    """Plans several schedules for the same arguments; a row each, for a table or a data frame.

    Args:
        schedules: their names; without any, all that have what they need.
        arguments: those of :func:`plan`. A limit, chunks, recompute or offload counts for the schedules that have it.

    Returns:
        A row has the schedule's figures, ``throughput_of_1f1b`` among them, or the ``reason`` why it has none.

    Raises:
        PlanError: where something is wrong for all of them, such as a name.
    """
    own = {each: part for part, each in _OF_SOME.items() if arguments.get(each) not in (None, False)}
    with _by_argument():
        names = tuple(schedules) or tuple(name for name in NAMES if name in with_parts(tuple(own.values())))
        check_parts(tuple(own.values()), names, _NAMES)
    common = {each: value for each, value in arguments.items() if each not in _OF_SOME.values()}
    base, rows = plan("1f1b", **common).iteration_time, []
    for name in names:
        heeded = {each: arguments[each] for each, part in own.items() if heeds(name, part)}
        try:
            found = figures(plan(name, **common, **heeded).timeline)
        except PlanError as error:
            rows.append(Row(name, str(error)))
        else:
            rows.append(Row(name, found, base / found.makespan))
    return as_records(rows)


def known_shape(model: str) -> Shape:
    """The model of that name, or of the flags in that file.

    Raises:
        PlanError: where it is neither.
    """
    if model in SHAPES:
        return SHAPES[model]
    if not os.path.exists(model):  # Path.exists would raise for a name that is too long
        close = difflib.get_close_matches(model, SHAPES, n=1, cutoff=0.4)
        hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(SHAPES)}"
        raise PlanError(f"{model!r} is neither a model known by name nor a file: {hint}", "model")
    return megatron_flags.read(Path(model))


def profile_costs(file: Path, ranks: int, loads: ModelLoads | None) -> Costs:
    """The costs measured in ``file``, for so many ranks of the model that has ``loads``.

    Raises:
        PlanError: where it cannot be read, or is of another model.
    """
    try:
        profile = read_profile(file)
    except PlanError as error:
        raise PlanError(str(error), "costs_file") from None
    if loads is not None and len(loads.layers) != profile.facts.layers:
        raise PlanError(
            f"the model has {len(loads.layers)} layers, and {file} was measured for {profile.facts.layers}", "model"
        )
    return profile.costs(ranks)


def _costs(costs: Costs | Sequence[float] | str | Path | None, ranks: int, loads: ModelLoads | None) -> Costs:
    """``costs`` with the model: what was measured of it goes before its arithmetic."""
    if costs is None:
        found = Costs() if loads is None else Costs(*loads.ratio)
    elif isinstance(costs, Costs):
        found = costs
    elif isinstance(costs, (str, Path)):
        found = profile_costs(Path(costs), ranks, loads)
    else:
        if len(costs) not in (3, 4):
            raise PlanError(f"F, I, W and optionally the P2P latency, three or four numbers, not {len(costs)}", "costs")
        for each in costs:
            _check_numbers(costs=each)
        forward, input_grad, weight_grad, comm = (*costs, 0.0)[:4]
        found = Costs(forward, input_grad, weight_grad, comm)
    return replace(found, model=found.model or loads)


def _check_whole(**values: int | None) -> None:
    for name, value in values.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise PlanError(f"{name}: must be a whole number above zero, not {value!r}", name)


def _check_numbers(**values: float | None) -> None:
    for name, value in values.items():
        if value is not None and not isinstance(value, (int, float)):
            raise PlanError(f"{name}: must be a number, not {value!r}", name)


def _layers(layers: str | Sequence[int] | None) -> tuple[int, ...] | None:
    """Those of each stage; None where they are even or searched."""
    if layers is None or layers in ("even", "auto"):
        return None
    if isinstance(layers, str):
        raise PlanError(f"{layers!r} is neither even, auto nor a sequence of numbers such as (3, 4, 4, 3)", "layers")
    return tuple(map(int, layers))


@contextmanager
def _by_argument() -> Iterator[None]:
    """What is wrong is said with the argument's name."""
    try:
        yield
    except PlanError as error:
        raise PlanError(error.told(_NAMES), _NAMES.get(error.about or "", error.about)) from None
