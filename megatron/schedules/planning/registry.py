"""Every schedule by its name, and the one way from a request to a plan."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import NamedTuple

from megatron.schedules.planning.errors import PlanError
from megatron.schedules.planning.named import from_file, interleaved, one_chunk, v_shaped
from megatron.schedules.planning.named.request import Request
from megatron.schedules.planning.schedule import Schedule
from megatron.schedules.planning.validate import validate

__all__ = ["NAMES", "Request", "describe", "plan"]


class _Entry(NamedTuple):
    build: Callable[[Request], Schedule]
    summary: str


_ENTRIES = {
    "1f1b": _Entry(one_chunk.one_f_one_b, "the usual schedule: memory of d microbatches, the baseline to compare with"),
    "eager-1f1b": _Entry(one_chunk.eager_1f1b, "1F1B that hides slow hops, at nearly twice its memory"),
    "interleaved-1f1b": _Entry(
        interleaved.interleaved_1f1b, "smaller bubble than 1F1B, for more memory and more messages"
    ),
    "zb-1p": _Entry(one_chunk.zb_1p, "less bubble than 1F1B at its memory, one chunk a rank"),
    "zb-2p": _Entry(one_chunk.zb_2p, "almost no bubble, one chunk a rank, at twice 1F1B's memory"),
    "1f1b-v": _Entry(v_shaped.one_f_one_b_v, "two thirds of 1F1B's memory without splitting the backward"),
    "v-min": _Entry(v_shaped.v_min, "the least memory, about a third of 1F1B's"),
    "v-half": _Entry(v_shaped.v_half, "half of 1F1B's memory and less bubble than 1F1B"),
    "v-zb": _Entry(v_shaped.v_zb, "almost no bubble at 1F1B's memory: the fastest where memory allows"),
    "file": _Entry(from_file.from_file, "a schedule of your own, from a compute-only CSV"),
}

NAMES = tuple(_ENTRIES)


def describe(name: str) -> str:
    """One line that says when to use schedule ``name``."""
    return _ENTRIES[name].summary


def plan(request: Request) -> Schedule:
    """The schedule asked for, validated.

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
    schedule = _ENTRIES[request.schedule].build(request)
    validate(schedule)
    request.costs.on(schedule.placement)  # costs that do not fit are a mistake even where the order asks for none
    return schedule
