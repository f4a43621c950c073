"""The search for lengths as machine code: its inner functions, compiled in turn."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from megatron.schedules.search import microbatch_order
from megatron.schedules.search.compiled import (
    calling,
    compiled,
    kept_code,
    named_tuple,
    policy_type,
    space_type,
    tasks_type,
)
from megatron.schedules.search.microbatch_order import Places, Work


@cache
def compiled_climb() -> Callable[..., tuple[float, float]]:
    """:func:`.microbatch_order.climb`, compiled for arrays; the first call on a machine takes some seconds."""
    import numba

    ints, floats = numba.int64[::1], numba.float64[::1]
    whole, number, tasks, policy = numba.int64, numba.float64, tasks_type(), policy_type()
    places = named_tuple(Places, tasks, tasks, ints, *(floats,) * 4, ints, floats)
    work = named_tuple(Work, space_type(), ints, ints)
    types: Any = numba.types
    both = types.UniTuple(number, 2)
    known: dict[str, Callable[..., Any]] = {"list_schedule": compiled()}
    functions: tuple[tuple[Any, Any], ...] = (
        (microbatch_order.put, numba.void(places, ints, floats, floats)),
        (microbatch_order.fits, numba.boolean(places, ints)),
        (microbatch_order.one_round, number(places, ints, policy, numba.boolean, work, ints)),
        (
            microbatch_order.climb,
            both(places, space_type(), floats, floats, ints, ints, number, whole, whole, number, whole, ints, ints),
        ),
    )
    for function, signature in functions:
        known[function.__name__] = kept_code(calling(function, known), signature)
    return known["climb"]
