"""Every schedule by its name, and the one way from a request to a plan."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import NamedTuple

from megatron.schedules.planning.adaptive.plan import plan_adaptive
from megatron.schedules.planning.errors import PlanError
from megatron.schedules.planning.named import from_file, interleaved, one_chunk, v_shaped
from megatron.schedules.planning.named.request import Request
from megatron.schedules.planning.schedule import Schedule, in_turn
from megatron.schedules.planning.simulate import Timeline, simulate
from megatron.schedules.planning.validate import validate

__all__ = ["NAMES", "Request", "Tick", "describe", "every_named", "plan"]

Tick = Callable[[float], None]


class _Entry(NamedTuple):
    build: Callable[[Request, Tick], Schedule]
    summary: str


def _quickly(build: Callable[[Request], Schedule]) -> Callable[[Request, Tick], Schedule]:
    """The builder of a schedule that is planned in a moment, with no progress to tell of."""
    return lambda request, tick: build(request)


def _adaptive(request: Request, tick: Tick) -> Schedule:
    return plan_adaptive(request, lambda asked: every_named(asked, asked.chunk_choices), tick)


def every_named(request: Request, chunk_choices: Collection[int] | None = None) -> list[Timeline]:
    """Every schedule known by name at the size and the costs of ``request``, with its times under them.

    Of those with so many chunks a rank only, where ``chunk_choices`` says so.
    """
    found = []
    for name in NAMES:
        if name not in ("adaptive", "file"):
            asked = replace(request, schedule=name)
            try:
                chunks = plan(replace(asked, microbatches=1)).placement.chunks
                if chunk_choices is not None and chunks not in chunk_choices:
                    continue
                schedule = plan(asked)
            except PlanError:  # its number of chunks does not go with the costs given for each stage
                continue
            found.append(simulate(schedule, request.costs.on(schedule.placement)))
    return found


_ENTRIES = {
    "1f1b": _Entry(
        _quickly(one_chunk.one_f_one_b), "the usual schedule: memory of d microbatches, the baseline to compare with"
    ),
    "eager-1f1b": _Entry(_quickly(one_chunk.eager_1f1b), "1F1B that hides slow hops, at nearly twice its memory"),
    "interleaved-1f1b": _Entry(
        _quickly(interleaved.interleaved_1f1b), "smaller bubble than 1F1B, for more memory and more messages"
    ),
    "zb-1p": _Entry(_quickly(one_chunk.zb_1p), "less bubble than 1F1B at its memory, one chunk a rank"),
    "zb-2p": _Entry(_quickly(one_chunk.zb_2p), "almost no bubble, one chunk a rank, at twice 1F1B's memory"),
    "1f1b-v": _Entry(_quickly(v_shaped.one_f_one_b_v), "two thirds of 1F1B's memory without splitting the backward"),
    "v-min": _Entry(_quickly(v_shaped.v_min), "the least memory, about a third of 1F1B's"),
    "v-half": _Entry(_quickly(v_shaped.v_half), "half of 1F1B's memory and less bubble than 1F1B"),
    "v-zb": _Entry(_quickly(v_shaped.v_zb), "almost no bubble at 1F1B's memory: the fastest where memory allows"),
    "adaptive": _Entry(_adaptive, "the best there is for your costs within the memory you name"),
    "file": _Entry(_quickly(from_file.from_file), "a schedule of your own, from a compute-only CSV"),
}

NAMES = tuple(_ENTRIES)


def describe(name: str) -> str:
    """One line that says when to use schedule ``name``."""
    return _ENTRIES[name].summary


def plan(request: Request, tick: Tick = lambda share: None) -> Schedule:
    """The schedule asked for, validated.

    Args:
        request: what is asked for.
        tick: called, where planning takes a while, with the share of the work done since the last call.

    Raises:
        PlanError: in one line, what is wrong with the request or why there is no such schedule.
    """
    if request.schedule not in _ENTRIES:
        close = difflib.get_close_matches(request.schedule, NAMES, n=1)
        hint = f"did you mean {close[0]}?" if close else f"use one of {', '.join(NAMES)}"
        raise PlanError(f"unknown schedule {request.schedule!r}: {hint}")
    if request.ranks < 2:
        raise PlanError(f"{request.schedule} needs at least 2 pipeline ranks, not {request.ranks}")
    if request.microbatches < 1:
        raise PlanError(f"{request.schedule} needs at least 1 microbatch, not {request.microbatches}")
    schedule = _ENTRIES[request.schedule].build(request, tick)
    validate(schedule)
    schedule = in_turn(schedule)
    request.costs.on(schedule.placement)  # costs that do not fit are a mistake even where the order asks for none
    return schedule
