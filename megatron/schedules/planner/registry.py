"""Registry of all schedules by name, and the function that turns a request into a plan."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from megatron.schedules.planner.adaptive import plan_adaptive
from megatron.schedules.planner.named import from_file, one_f_one_b, v_shaped
from megatron.schedules.planner.request import Request
from megatron.schedules.planner.vocabulary_passes import share_output
from megatron.schedules.schedule.kinds import OF_RANKS
from megatron.schedules.schedule.placement import Placement, interleaved, sequential, zigzag
from megatron.schedules.schedule.schedule import Schedule, all_split, in_microbatch_order
from megatron.schedules.schedule.simulator import Timeline, simulate
from megatron.schedules.schedule.validation import validate
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.progress import Progress, unheard

__all__ = [
    "CHOICES",
    "NAMES",
    "Request",
    "check_parts",
    "describe",
    "every_named",
    "placement",
    "plan",
    "stages",
    "with_parts",
]

# Chooses among all other schedules; see :mod:`.service`.
AUTO = "auto"


class _Entry(NamedTuple):
    """A schedule in the registry.

    Args:
        build: builds the schedule and reports its progress.
        summary: one line that says when to use it.
        placement: returns its placement for a number of ranks and of chunks per rank; None if only the plan says.
        chunks: chunks per rank; None if the request says it.
        heeds: the request's optional parts that this schedule uses.
        needs: those of them that are required, each with a description.
        stated: True if the order does not depend on costs.
        splits: True if backwards may be split into I and W.
    """

    build: Callable[[Request, Progress], Schedule]
    summary: str
    placement: Callable[[int, int], Placement] | None = None
    chunks: int | None = None
    heeds: tuple[str, ...] = ()
    needs: Mapping[str, str] = MappingProxyType({})
    stated: bool = False
    splits: bool = True


def _at_once(build: Callable[[Request], Schedule]) -> Callable[[Request, Progress], Schedule]:
    """Wraps a builder that needs no search and reports no progress."""
    return lambda request, progress: build(request)


def _adaptive(request: Request, progress: Progress) -> Schedule:
    return plan_adaptive(request, lambda asked: every_named(asked, asked.chunk_choices), progress)


def _auto(request: Request, progress: Progress) -> Schedule:
    raise PlanError("auto is chosen by the planner's service", "schedule")


def every_named(
    request: Request, chunk_choices: Collection[int] | None = None, names: Collection[str] | None = None
) -> list[Timeline]:
    """Timelines of all named schedules for the size and the costs of ``request``.

    Args:
        request: size and costs.
        chunk_choices: only schedules with one of these numbers of chunks per rank; None for any.
        names: only schedules with one of these names; None for any.
    """
    timelines = []
    for name, entry in _ENTRIES.items():
        chunks = entry.chunks or request.chunks
        if name in ("adaptive", AUTO, "file") or (chunk_choices is not None and chunks not in chunk_choices):
            continue
        if names is not None and name not in names:
            continue
        try:
            schedule = plan(replace(request, schedule=name))
        except PlanError:  # its number of chunks does not match the costs per stage
            continue
        timelines.append(simulate(schedule, request.costs_on(schedule.placement)))
    return timelines


def named_within(request: Request) -> list[Timeline]:
    """Timelines of the named schedules within the memory limit and the chunk choices of ``request``.

    ``interleaved-1f1b`` is tried with every number of chunks. Without a memory limit all schedules are returned.
    """
    most = max(request.chunk_choices, default=1)
    allowed = request.chunk_choices if request.divides else range(1, most + 1)
    timelines = every_named(request, allowed)
    for chunks in range(request.chunks + 1, most + 1):
        timelines += every_named(replace(request, chunks=chunks), allowed, ("interleaved-1f1b",))
    return [
        timeline
        for timeline in timelines
        if request.allows(timeline) and request.placement in (None, timeline.schedule.placement)
    ]


def _sequential(ranks: int, chunks: int) -> Placement:
    return sequential(ranks)


_ENTRIES = {
    "1f1b": _Entry(
        _at_once(one_f_one_b.one_f_one_b),
        "the usual schedule: memory of d microbatches, the baseline to compare with",
        _sequential,
        chunks=1,
        stated=True,
        splits=False,
    ),
    "eager-1f1b": _Entry(
        _at_once(one_f_one_b.eager_1f1b),
        "1F1B that hides slow messages, at nearly twice its memory",
        _sequential,
        chunks=1,
        stated=True,
        splits=False,
    ),
    "interleaved-1f1b": _Entry(
        _at_once(one_f_one_b.interleaved_1f1b),
        "smaller bubble than 1F1B, for more memory and more messages",
        interleaved,
        stated=True,
        splits=False,
    ),
    "zb-1p": _Entry(
        one_f_one_b.zb_1p,
        "less bubble than 1F1B at its memory, one chunk a rank",
        _sequential,
        chunks=1,
    ),
    "zb-2p": _Entry(
        one_f_one_b.zb_2p,
        "almost no bubble, one chunk a rank, at twice 1F1B's memory",
        _sequential,
        chunks=1,
    ),
    "1f1b-v": _Entry(
        v_shaped.one_f_one_b_v,
        "two thirds of 1F1B's memory without splitting the backward",
        zigzag,
        chunks=2,
        splits=False,
    ),
    "v-min": _Entry(
        v_shaped.v_min,
        "the least memory, about a third of 1F1B's",
        zigzag,
        chunks=2,
    ),
    "v-half": _Entry(
        v_shaped.v_half,
        "half of 1F1B's memory and less bubble than 1F1B",
        zigzag,
        chunks=2,
    ),
    "v-zb": _Entry(
        v_shaped.v_zb,
        "almost no bubble at 1F1B's memory: the fastest where memory allows",
        zigzag,
        chunks=2,
    ),
    "adaptive": _Entry(
        _adaptive,
        "the best there is for your costs within the memory you name",
        heeds=("memory_limit", "recompute", "offload"),
        needs={"memory_limit": "a fraction of 1F1B's activation memory, such as 0.5"},
    ),
    AUTO: _Entry(
        _auto,
        "the shortest of all within your memory: chunks, layers and order are chosen for you",
        heeds=("memory_limit", "search_seconds", "chunks", "recompute", "offload"),
    ),
    "file": _Entry(
        _at_once(from_file.from_file),
        "a schedule of your own, from a compute-only CSV",
        heeds=("csv", "offload"),
        needs={"csv": "a compute-only CSV, one row a rank"},
        stated=True,
    ),
}

CHOICES = tuple(_ENTRIES)
"""All that a user may name."""
NAMES = tuple(name for name in CHOICES if name != AUTO)
"""Schedules that a plan may have."""
WRITTEN = {"FILE.csv" if name == "file" else name: name for name in (AUTO, *NAMES)}
"""All that a user may name, as the user writes it."""


def describe(name: str) -> str:
    """One line that says when to use schedule ``name``."""
    return _ENTRIES[name].summary


def follows_costs(name: str, *, shared_vocabulary: bool) -> bool:
    """Returns True if the order of schedule ``name`` depends on the costs.

    With a shared vocabulary this includes schedules where only the position of S and T depends on them.
    """
    return not _entry(name).stated or (shared_vocabulary and name != "file")


def splits(name: str) -> bool:
    """Returns True if schedule ``name`` may split backwards into I and W."""
    return _entry(name).splits


def names_following_costs() -> tuple[str, ...]:
    """Names of the schedules whose order depends on the costs."""
    return tuple(name for name, entry in _ENTRIES.items() if not entry.stated)


def check_parts(given: Collection[str], names: Sequence[str], flags: Mapping[str, str]) -> None:
    """Checks that all required parts of a request are given, and none that would be ignored.

    Args:
        given: the parts that are given.
        names: the requested schedules; may be empty.
        flags: the caller's flag for each part, and for ``schedule``.

    Raises:
        PlanError: if a name is unknown, or a part is missing or unused; names the flag.
    """
    for name in names:
        for part, what in _entry(name).needs.items():
            if part not in given:
                raise PlanError(f"{flags[part]} is missing: {flags['schedule']} {name} needs {what}")
    not_always = {part for entry in _ENTRIES.values() for part in entry.heeds}
    for part in sorted(not_always & set(given)):
        if any(heeds(name, part) for name in names):
            continue
        instead = f", not {', '.join(names)}: leave one of them out" if names else ", which is missing"
        if len(names) > 2:
            instead = ", which is not among those asked for: leave the flag out"
        raise PlanError(f"{flags[part]} goes with {flags['schedule']} {' or '.join(heeding(part))}{instead}")


def own_chunks(name: str) -> int | None:
    """Chunks per rank of schedule ``name``; None if the request says it."""
    return _entry(name).chunks


def heeds(name: str, part: str) -> bool:
    """Returns True if schedule ``name`` uses this optional part of a request."""
    return part in _entry(name).heeds


def heeding(part: str) -> list[str]:
    """Names of the schedules that use this optional part of a request."""
    return [name for name in CHOICES if heeds(name, part)]


def with_parts(given: Collection[str]) -> tuple[str, ...]:
    """Names of the schedules that need no parts other than ``given``."""
    return tuple(name for name, entry in _ENTRIES.items() if set(entry.needs) <= set(given))


def placement(request: Request) -> Placement | None:
    """Placement of the plan, known without planning; None if it is searched for."""
    entry = _entry(request.schedule)
    if request.schedule == "file":
        return from_file.from_file(request).placement
    if entry.placement is None:
        return request.placement
    return entry.placement(request.ranks, entry.chunks or request.chunks)


def with_own_saving(request: Request) -> Request:
    """Returns ``request`` with recompute and offload as its schedule's CSV says.

    Other schedules are returned unchanged.

    Raises:
        PlanError: if the CSV cannot be read.
    """
    return from_file.with_memory_saving(request) if request.schedule == "file" else request


def stages(request: Request) -> int:
    """Number of stages of the plan; the largest possible number if the placement is searched for."""
    known = placement(request)
    return request.ranks * max(request.chunk_choices, default=1) if known is None else known.stages


def planned_makespan(request: Request, planned: Callable[[Request], Schedule]) -> float:
    """Makespan of the plan that ``planned`` makes for ``request``, in the unit of the costs."""
    schedule = planned(request)
    return simulate(schedule, request.costs_on(schedule.placement)).makespan


def _entry(name: str) -> _Entry:
    if name not in _ENTRIES:
        close = difflib.get_close_matches(name.lower(), CHOICES, n=1)
        hint = f"did you mean {close[0]}?" if close else f"use one of {', '.join(WRITTEN)}"
        raise PlanError(f"unknown schedule {name!r}: {hint}", "schedule")
    return _ENTRIES[name]


def plan(request: Request, progress: Progress = unheard) -> Schedule:
    """Plans a request and validates the schedule. A long search reports its ``progress``.

    Raises:
        PlanError: one line that says what is wrong with the request, or why it has no plan.
    """
    schedule = unchecked_plan(request, progress)
    validate(schedule)
    schedule = in_microbatch_order(schedule)
    request.costs_on(schedule.placement)  # raises for wrong costs, even if the order does not depend on them
    return schedule


def unchecked_plan(request: Request, progress: Progress = unheard) -> Schedule:
    """Plans a request without validation, for searches that compare many plans.

    The plan that is chosen is planned again by :func:`plan`.
    """
    entry = _entry(request.schedule)
    if request.ranks < 2:
        raise PlanError(f"{request.schedule} needs at least 2 pipeline ranks, not {request.ranks}", "ranks")
    if request.microbatches < 1:
        raise PlanError(f"{request.schedule} needs at least 1 microbatch, not {request.microbatches}", "microbatches")
    request = request.around_one()
    schedule = entry.build(request, progress)
    shared = bool(schedule.kinds.intersection(OF_RANKS))
    if request.schedule == "file" and shared != request.costs.model.shared_vocabulary:
        has = (
            "the CSV has S and T: leave them out, or share"
            if shared
            else "the CSV has no S and T, which it takes to share"
        )
        raise PlanError(f"{has} the vocabulary among all ranks", "shared_vocabulary")
    if request.costs.model.shared_vocabulary and not shared:
        schedule = share_output(schedule, request.costs_on(schedule.placement), progress)
    return all_split(schedule) if request.alike and request.schedule != "file" else schedule
