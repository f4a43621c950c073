"""Plans from Python, without torch: see docs/python-api.md.

``import megatron.schedules as ms`` brings :func:`plan` and :func:`compare`; what they need is imported when they are
called first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypedDict, Unpack

from megatron.schedules.job import values
from megatron.schedules.job.plan_job import plan_job
from megatron.schedules.job.plans import JobPlans, job_plans
from megatron.schedules.job.spec import Settings
from megatron.schedules.planner import service
from megatron.schedules.planner.registry import NAMES
from megatron.schedules.report.drawing import drawn, of_plans
from megatron.schedules.report.figures import figures
from megatron.schedules.report.table import Row, as_records
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.printable import counted, percent
from megatron.schedules.utils.progress import Progress, unheard

__all__ = ["Plan", "PlanError", "compare", "plan"]

# A larger drawing makes a notebook slow.
_MOST_DRAWN = 4_000
# The argument of each part of a request, of costs and of decisions.
_NAMES: Mapping[str, str] = {
    **{name: name for name in ("schedule", "microbatches", "costs", "model", "layers", "memory_limit")},
    "search_seconds": "search_seconds",
    "ranks": "pipeline_size",
    "chunks": "schedule",
    "csv": "schedule",
    "costs_file": "costs",
    "shared_vocabulary": "vocabulary_parallel",
    "recompute": "save_memory recompute",
    "offload": "save_memory offload",
    "copy": "costs",
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
        return str(drawn(drawing, "svg")) if drawing.passes <= _MOST_DRAWN else None


class Arguments(TypedDict, total=False):
    """Arguments of :func:`plan` and :func:`compare` by name, see there."""

    pipeline_size: int
    microbatches: int
    memory_limit: float | str | None
    costs: Costs | Sequence[float] | str | Path | None
    model: str | Path | None
    layers: str | Sequence[int] | None
    save_memory: str
    vocabulary_parallel: bool
    search_seconds: float | None


def plan(schedule: str | Path, *, progress: Progress = unheard, **arguments: Unpack[Arguments]) -> Plan:
    """Plans one schedule. The arguments take what the command line's flags of these names take.

    Args:
        schedule: a name, which chunks per rank may follow, such as ``adaptive:8``; ``auto`` for the shortest of all
            within the memory limit; or the path of a compute-only CSV.
        progress: told what share of the planning has been done since it was told last.
        pipeline_size: pipeline ranks, 2 or more; a CSV says it itself.
        microbatches: of one iteration; a CSV says it itself.
        memory_limit: for ``adaptive`` and ``auto``, the most activation memory of a rank: a fraction of 1F1B's, or a
            size such as ``20GiB``.
        costs: F, I, W and optionally P2P latency of half a rank's layers, or the path of a cost file; without it the
            model's arithmetic, or equal times.
        model: a name such as ``Llama-3-8B``, or the path of a file of Megatron's flags.
        layers: decoder layers of each stage, ``even``, or ``auto`` for the shortest plan. Without it ``even``, but
            ``auto`` for the schedule ``auto``.
        save_memory: for ``adaptive`` and ``auto``: ``none``, ``recompute``, ``offload[=GB/s]`` or ``both[=GB/s]``.
        vocabulary_parallel: whether all ranks share the embedding and the output layer.
        search_seconds: for ``adaptive`` and ``auto``, how long to search, in seconds of a usual core.

    Raises:
        PlanError: in one line, which argument is wrong and what would work.
    """
    with _by_argument():
        job = plan_job(_plans([schedule], arguments).specs[0], make=partial(service.make_plan, progress=progress))
    made = job.plan
    return Plan(made.asked, made.request, made.schedule, made.named)


def compare(schedules: Sequence[str | Path] = (), **arguments: Unpack[Arguments]) -> list[dict[str, object]]:
    """Plans several schedules for the same arguments; a row each, for a table or a data frame.

    Args:
        schedules: as :func:`plan` takes them; without any, all that have what they need.
        arguments: those of :func:`plan`. A limit and memory saving count for the schedules that have them.

    Returns:
        A row has the schedule's figures, ``throughput_of_1f1b`` among them, or the ``reason`` why it has none.

    Raises:
        PlanError: where something is wrong for all of them, such as a name.
    """
    with _by_argument():
        plans = _plans(schedules, arguments)
        rows = [
            Row(name, job if isinstance(job, str) else figures(job.plan.timeline, plans.microbatch_bytes), throughput)
            for name, job, throughput in plans.compared()
        ]
    return as_records(rows)


def _plans(schedules: Sequence[str | Path], arguments: Arguments) -> JobPlans:
    """Reads the arguments of :func:`plan`."""
    if unknown := arguments.keys() - Arguments.__annotations__:
        raise TypeError(f"there is no argument {min(unknown)!r}")
    ranks = _count("pipeline_size", arguments.get("pipeline_size"))
    microbatches = _count("microbatches", arguments.get("microbatches"))
    search_seconds, memory_limit = arguments.get("search_seconds"), arguments.get("memory_limit")
    if search_seconds is not None and not isinstance(search_seconds, (int, float)):
        raise PlanError(f"search_seconds: must be a number, not {search_seconds!r}")
    settings = Settings(
        values.ScheduleChoice("", ""),
        None if memory_limit is None else values.memory_limit("memory_limit", str(memory_limit)),
        _costs(arguments.get("costs")),
        _layers(arguments.get("layers")),
        values.memory_saving("save_memory", arguments.get("save_memory", "none")),
        arguments.get("vocabulary_parallel", False),
        search_seconds=search_seconds,
    )
    model = arguments.get("model")
    named = None if model is None else str(model)
    return job_plans(list(map(str, schedules)), NAMES, settings, ranks, microbatches, named, _NAMES)


def _count(name: str, count: object) -> int | None:
    if count is None:  # a CSV may say it
        return None
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise PlanError(f"{name}: must be a whole number above zero, not {count!r}")
    return count


def _costs(costs: Costs | Sequence[float] | str | Path | None) -> values.CostsChoice | None:
    if costs is None:
        return None
    if isinstance(costs, Costs):
        return values.CostsChoice("Costs(...)", times=costs)
    if isinstance(costs, (str, Path)):
        return values.costs_choice("costs", str(costs))
    return values.costs_choice("costs", ",".join(map(str, costs)))


def _layers(layers: str | Sequence[int] | None) -> values.Layers | None:
    given = layers if layers is None or isinstance(layers, str) else ",".join(map(str, layers))
    return values.layers_choice("layers", given)


@contextmanager
def _by_argument() -> Iterator[None]:
    """Names the argument in errors."""
    try:
        yield
    except PlanError as error:
        raise PlanError(error.told(_NAMES), _NAMES.get(error.about or "", error.about)) from None
