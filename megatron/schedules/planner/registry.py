"""Every schedule by its name, and the one way from a request to a plan."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from megatron.schedules.planner.adaptive import plan_adaptive
from megatron.schedules.planner.named import from_file, interleaved_1f1b, one_chunk, v_shaped
from megatron.schedules.planner.request import Request
from megatron.schedules.planner.vocabulary_passes import share_output
from megatron.schedules.schedule.kinds import OF_RANKS
from megatron.schedules.schedule.placement import Placement, interleaved, sequential, zigzag
from megatron.schedules.schedule.schedule import Schedule, in_microbatch_order
from megatron.schedules.schedule.simulator import Timeline, simulate
from megatron.schedules.schedule.validation import validate
from megatron.schedules.search.list_scheduling import EPSILON
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.progress import Progress, unheard

__all__ = ["NAMES", "Request", "check_parts", "describe", "every_named", "placement", "plan", "stages", "with_parts"]

# Chooses among all others; see :mod:`.service`.
AUTO = "auto"


class _Entry(NamedTuple):
    """One schedule by name.

    Args:
        build: makes it; hears of progress.
        summary: one line that says when to use it.
        placement: where it puts the stages of so many ranks with so many chunks each; None where only its plan says.
        chunks: stages a rank holds; None where the request says it.
        heeds: the parts of a request that not every schedule heeds, and this one does.
        needs: those of them that it cannot do without, and what they are.
        stated: whether its order is the same whatever passes cost.
        splits: whether it may split backwards into I and W.
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
    """The builder of a schedule that is stated rather than searched for, with no progress to tell of."""
    return lambda request, progress: build(request)


def _adaptive(request: Request, progress: Progress) -> Schedule:
    return plan_adaptive(request, lambda asked: every_named(asked, asked.chunk_choices), progress)


def _auto(request: Request, progress: Progress) -> Schedule:
    raise PlanError("auto is chosen by the planner's service", "schedule")


def every_named(
    request: Request, chunk_choices: Collection[int] | None = None, names: Collection[str] | None = None
) -> list[Timeline]:
    """Every schedule known by name at the size and the costs of ``request``, with its times under them.

    Of those with so many chunks a rank only, where ``chunk_choices`` says so, and of ``names``, where these are given.
    """
    found = []
    for name, entry in _ENTRIES.items():
        chunks = entry.chunks or request.chunks
        if name in ("adaptive", AUTO, "file") or (chunk_choices is not None and chunks not in chunk_choices):
            continue
        if names is not None and name not in names:
            continue
        try:
            schedule = plan(replace(request, schedule=name))
        except PlanError:  # its number of chunks does not go with the costs given for each stage
            continue
        found.append(simulate(schedule, request.costs_on(schedule.placement)))
    return found


def named_within(request: Request) -> list[Timeline]:
    """Schedules by name within the memory limit and the chunks of ``request``, ``interleaved-1f1b`` with any of these.

    All of them where there is no limit.
    """
    found, most = every_named(request), max(request.chunk_choices, default=1)
    for chunks in range(request.chunks + 1, most + 1):
        found += every_named(replace(request, chunks=chunks), names=("interleaved-1f1b",))
    limit = math.inf if request.memory_limit is None else request.memory_limit * request.ranks
    return [
        line
        for line in found
        if line.limit <= limit + EPSILON
        and line.schedule.placement.chunks <= most
        and request.placement in (None, line.schedule.placement)
    ]


def _sequential(ranks: int, chunks: int) -> Placement:
    return sequential(ranks)


_ENTRIES = {
    "1f1b": _Entry(
        _at_once(one_chunk.one_f_one_b),
        "the usual schedule: memory of d microbatches, the baseline to compare with",
        _sequential,
        chunks=1,
        stated=True,
        splits=False,
    ),
    "eager-1f1b": _Entry(
        _at_once(one_chunk.eager_1f1b),
        "1F1B that hides slow messages, at nearly twice its memory",
        _sequential,
        chunks=1,
        stated=True,
        splits=False,
    ),
    "interleaved-1f1b": _Entry(
        _at_once(interleaved_1f1b.interleaved_1f1b),
        "smaller bubble than 1F1B, for more memory and more messages",
        interleaved,
        stated=True,
        splits=False,
    ),
    "zb-1p": _Entry(
        one_chunk.zb_1p,
        "less bubble than 1F1B at its memory, one chunk a rank",
        _sequential,
        chunks=1,
    ),
    "zb-2p": _Entry(
        one_chunk.zb_2p,
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

NAMES = tuple(name for name in _ENTRIES if name != AUTO)


def describe(name: str) -> str:
    """One line that says when to use schedule ``name``."""
    return _ENTRIES[name].summary


def follows_costs(name: str, *, shared_vocabulary: bool) -> bool:
    """Whether the order of schedule ``name`` depends on what passes cost, be it only where S and T stand in it."""
    return not _entry(name).stated or (shared_vocabulary and name != "file")


def splits(name: str) -> bool:
    """Whether schedule ``name`` may split backwards into I and W."""
    return _entry(name).splits


def names_following_costs() -> tuple[str, ...]:
    """The schedules whose order depends on what passes cost."""
    return tuple(name for name, entry in _ENTRIES.items() if not entry.stated)


def check_parts(given: Collection[str], names: Sequence[str], flags: Mapping[str, str]) -> None:
    """Refuse a name that no schedule has, a part of a request that is missing, and one that would be ignored.

    Args:
        given: the parts that are given.
        names: the schedules asked for; none where none is.
        flags: how whoever asked writes each part, and ``schedule``.

    Raises:
        PlanError: naming the flag that is wrong or missing.
    """
    for name in names:
        for part, what in _entry(name).needs.items():
            if part not in given:
                raise PlanError(f"{flags[part]} is missing: {flags['schedule']} {name} needs {what}")
    not_always = {part for entry in _ENTRIES.values() for part in entry.heeds}
    for part in sorted(not_always & set(given)):
        if any(heeds(name, part) for name in names):
            continue
        heeding = [name for name in NAMES if part in _ENTRIES[name].heeds]
        instead = f", not {', '.join(names)}: leave one of them out" if names else ", which is missing"
        if len(names) > 2:
            instead = ", which is not among those asked for: leave the flag out"
        raise PlanError(f"{flags[part]} goes with {flags['schedule']} {' or '.join(heeding)}{instead}")


def own_chunks(name: str) -> int | None:
    """How many chunks a rank of schedule ``name`` holds; None where the request says it."""
    return _entry(name).chunks


def heeds(name: str, part: str) -> bool:
    """Whether schedule ``name`` has that part of a request, which not every schedule has."""
    return part in _entry(name).heeds


def with_parts(given: Collection[str]) -> tuple[str, ...]:
    """The schedules that have all they need where ``given`` is given."""
    return tuple(name for name, entry in _ENTRIES.items() if set(entry.needs) <= set(given))


def placement(request: Request) -> Placement | None:
    """Where the plan will put the stages, told without planning; None where that is searched for."""
    entry = _entry(request.schedule)
    if request.schedule == "file":
        return from_file.from_file(request).placement
    if entry.placement is None:
        return request.placement
    return entry.placement(request.ranks, entry.chunks or request.chunks)


def with_own_saving(request: Request) -> Request:
    """``request`` with what is recomputed and offloaded where its schedule itself says so, as a CSV does.

    Raises:
        PlanError: where the CSV cannot be read.
    """
    return from_file.with_memory_saving(request) if request.schedule == "file" else request


def stages(request: Request) -> int:
    """How many stages the plan will have, or, where that is searched for, may have at most."""
    known = placement(request)
    return request.ranks * max(request.chunk_choices, default=1) if known is None else known.stages


def planned_makespan(request: Request, planned: Callable[[Request], Schedule] | None = None) -> float:
    """How long its plan takes, made by ``planned``, or by :func:`plan`."""
    schedule = (planned or plan)(request)
    return simulate(schedule, request.costs_on(schedule.placement)).makespan


def _entry(name: str) -> _Entry:
    if name not in _ENTRIES:
        close = difflib.get_close_matches(name.lower(), (AUTO, *NAMES), n=1)
        hint = f"did you mean {close[0]}?" if close else f"use one of {', '.join(NAMES)}"
        raise PlanError(f"unknown schedule {name!r}: {hint}", "schedule")
    return _ENTRIES[name]


def plan(request: Request, progress: Progress = unheard) -> Schedule:
    """The schedule asked for, validated.

    Args:
        request: what is asked for.
        progress: hears how far the planning is, where that takes a while.

    Raises:
        PlanError: in one line, what is wrong with the request or why there is no such schedule.
    """
    schedule = unchecked_plan(request, progress)
    validate(schedule)
    schedule = in_microbatch_order(schedule)
    request.costs_on(schedule.placement)  # costs that do not fit are a mistake even where the order asks for none
    return schedule


def unchecked_plan(request: Request, progress: Progress = unheard) -> Schedule:
    """The same, not validated, for a search that compares many plans; the one that is taken is planned again."""
    entry = _entry(request.schedule)
    if request.ranks < 2:
        raise PlanError(f"{request.schedule} needs at least 2 pipeline ranks, not {request.ranks}", "ranks")
    if request.microbatches < 1:
        raise PlanError(f"{request.schedule} needs at least 1 microbatch, not {request.microbatches}", "microbatches")
    schedule = entry.build(request, progress)
    shared = bool(schedule.kinds.intersection(OF_RANKS))
    if request.schedule == "file" and shared != request.costs.shared_vocabulary:
        has = (
            "the CSV has S and T: leave them out, or share"
            if shared
            else "the CSV has no S and T, which it takes to share"
        )
        raise PlanError(f"{has} the vocabulary among all ranks", "shared_vocabulary")
    if request.costs.shared_vocabulary and not shared:
        schedule = share_output(schedule, request.around_one().costs_on(schedule.placement), progress)
    return schedule
