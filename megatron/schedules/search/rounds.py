"""List scheduling of one schedule's tasks, in Python or as machine code: the same orders either way."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import copy
from functools import partial
from typing import Any

from megatron.schedules.search.forward_backward import Both, Work, settle
from megatron.schedules.search.list_scheduling import NEVER, Policy, sound, space_for
from megatron.schedules.search.tasks import Tasks


class Rounds:
    """Rounds of list scheduling, forward and backward in time.

    Args:
        tasks: what is scheduled.
        compiled: whether by machine code. That takes a second or two once, and then next to nothing.
    """

    def __init__(self, tasks: Tasks, *, compiled: bool) -> None:
        self._both: Any
        self._work: Callable[[Both], tuple[Work, Any]]
        self._ints: Callable[[Any], Any]
        self._floats: Callable[[Any], Any]
        if compiled:
            import numpy as np

            from megatron.schedules.search import compiled as machine_code

            self._both, self._settle, self._work = tasks.arrays, machine_code.compiled(), machine_code.work_for
            self._ints, self._floats = partial(np.asarray, dtype=np.int64), partial(np.asarray, dtype=np.float64)
        else:
            self._both, self._settle, self._work = tasks.both, settle, work_for
            self._ints = self._floats = list

    def settled(
        self,
        order: Any,
        limits: Any,
        first: Policy,
        plain: Policy | None = None,
        *,
        backwards: bool = False,
        most: int = 0,
    ) -> tuple[Any, float, int]:
        """The order that :func:`.settle` makes of ``order``, its makespan, and how many rounds that took.

        Args:
            order, limits: sequences; machine code takes arrays as they are.
            first, plain, backwards, most: see :func:`.settle`; ``plain`` is the first, too, where it is left out.

        Raises:
            ValueError: where a policy cannot be followed, or ``order`` does not keep within ``limits``.
        """
        policies = sound(first), sound(plain or first)
        order, limits, (work, found) = self._ints(order), self._floats(limits), self._work(self._both)
        length, rounds = self._settle(self._both, order, limits, *policies, backwards, most, math.inf, work, found)
        if length >= NEVER:
            raise ValueError("the order cannot run within its limits")
        return found, length, rounds

    def under(self, times: Any, changes: Any) -> Rounds:
        """The same, compiled, with other times and changes of memory."""
        import numpy as np

        other, (forward, backward, turned) = copy(self), self._both
        copies = forward.channel >= 0
        timed = {"duration": np.where(copies, 0.0, times), "copying": np.where(copies, times, 0.0)}
        other._both = Both(
            forward._replace(change=changes, **timed), backward._replace(change=-changes, **timed), turned
        )
        return other


def work_for(both: Both) -> tuple[Work, list[int]]:
    """Lists that :func:`.settle` writes, and one for the order that it makes."""
    base, other, found = ([0] * len(both.turned) for _ in range(3))
    return Work(space_for(both.forward), base, other), found
