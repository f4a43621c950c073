"""List scheduling of one schedule's tasks, in Python or as compiled code, with the same results."""

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
        tasks: the tasks to schedule.
        compiled: use compiled code. It takes a second or two to load once, and very little time per round.
    """

    def __init__(self, tasks: Tasks, *, compiled: bool) -> None:
        self.both: Any
        self._work: Callable[[Both], tuple[Work, Any]]
        self._ints: Callable[[Any], Any]
        self._floats: Callable[[Any], Any]
        if compiled:
            import numpy as np

            from megatron.schedules.search import compiled as machine_code

            self.both, self._settle, self._work = tasks.arrays, machine_code.compiled(), machine_code.work_for
            self._ints, self._floats = partial(np.asarray, dtype=np.int64), partial(np.asarray, dtype=np.float64)
        else:
            self.both, self._settle, self._work = tasks.both, settle, work_for
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
        """Returns the order that :func:`.settle` makes of ``order``, its makespan, and the number of rounds.

        Args:
            order: task numbers; an array for compiled code is not copied.
            limits: memory limit of each rank; the same.
            first, plain, backwards, most: see :func:`.settle`. The default of ``plain`` is ``first``.

        Raises:
            ValueError: if a policy is invalid, or ``order`` does not keep within ``limits``.
        """
        policies = sound(first), sound(plain or first)
        order, limits, (work, found) = self._ints(order), self._floats(limits), self._work(self.both)
        length, rounds = self._settle(self.both, order, limits, *policies, backwards, most, math.inf, work, found)
        if length >= NEVER:
            raise ValueError("the order cannot run within its limits")
        return found, length, rounds

    def under(self, times: Any, changes: Any) -> Rounds:
        """Returns the same rounds, compiled, with other times and other changes of memory."""
        import numpy as np

        other, (forward, backward, turned) = copy(self), self.both
        copies = forward.channel >= 0
        timed = {"duration": np.where(copies, 0.0, times), "copying": np.where(copies, times, 0.0)}
        other.both = Both(
            forward._replace(change=changes, **timed), backward._replace(change=-changes, **timed), turned
        )
        return other


def work_for(both: Both) -> tuple[Work, list[int]]:
    """Allocates the lists that :func:`.settle` writes, and one for the resulting order."""
    base, other, found = ([0] * len(both.turned) for _ in range(3))
    return Work(space_for(both.forward), base, other), found
