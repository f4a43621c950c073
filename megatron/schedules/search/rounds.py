"""List scheduling of one schedule's tasks, in Python or as compiled code, with the same results."""

from __future__ import annotations

import math
from copy import copy
from itertools import chain
from typing import Any

from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.stage_costs import StageCosts
from megatron.schedules.search.forward_backward import Both, Work, settle
from megatron.schedules.search.list_scheduling import NEVER, Policy, sound, space_for
from megatron.schedules.search.tasks import Tasks, messages_of_tasks
from megatron.schedules.utils.private_folder import has_compiled_code

# Passes that Python schedules while compiled code is loaded, or compiled, which needs almost no time for them.
_LOADING, _COMPILING = 700_000, 1_600_000


def pays_off(passes: float) -> bool:
    """Checks whether compiled code takes less time than Python to schedule ``passes`` passes, counted in all rounds.

    If so, it is ready at the end: compiling takes memory that must not add to that of the passes.
    """
    if passes <= _LOADING or (passes <= _COMPILING and not has_compiled_code()):
        return False
    from megatron.schedules.search.compiled import compiled_climb, is_kept

    if passes <= _COMPILING and not is_kept():
        return False
    compiled_climb()
    return True


class Rounds:
    """Rounds of list scheduling, forward and backward in time.

    Args:
        tasks: the tasks to schedule.
        compiled: use compiled code. It takes a second or two to load once, and very little time per round.
    """

    def __init__(self, tasks: Tasks, *, compiled: bool) -> None:
        self._compiled = compiled
        self.both: Any = tasks.arrays if compiled else tasks.both

    def settled(
        self, order: Any, limits: Any, policy: Policy, *, backwards: bool = False, most: int = 0
    ) -> tuple[Any, float, int]:
        """Returns the order that :func:`.settle` makes of ``order``, its makespan, and the number of rounds.

        Args:
            order: task numbers.
            limits: memory limit of each rank; an array for compiled code is not copied.
            policy: policy of the first round; the others have no noise.
            backwards, most: see :func:`.settle`.

        Raises:
            ValueError: if the policy is invalid, or ``order`` does not keep within ``limits``.
        """
        policy = sound(policy)
        result, length, rounds = (self._in_machine_code if self._compiled else self._in_python)(
            order, limits, policy, backwards, most
        )
        if length >= NEVER:
            raise ValueError("the order cannot run within its limits")
        return result, length, rounds

    def _in_python(self, order: Any, limits: Any, policy: Policy, backwards: bool, most: int) -> tuple[Any, float, int]:
        work, result = work_for(self.both)
        plain = policy._replace(noise=0.0)
        ends = settle(self.both, list(order), list(limits), policy, plain, backwards, most, math.inf, work, result)
        return result, *ends

    def _in_machine_code(
        self, order: Any, limits: Any, policy: Policy, backwards: bool, most: int
    ) -> tuple[Any, float, int]:
        """Carries out one move of a climb."""
        import numpy as np

        from megatron.schedules.search import compiled
        from megatron.schedules.search.moves import ALIKE, NONE, Move, Orders, Rules

        result = Orders(NONE, np.array(order, np.int64))
        tasks = self.both, np.asarray(limits, np.float64), ALIKE, Rules(math.inf, math.inf, most)
        move, work = compiled.records([Move(policy, backwards)]), compiled.work_for(self.both)
        length, _, rounds, _ = compiled.compiled_climb()(*tasks, move, 1.0, work, result, math.inf, result, math.inf)
        return result.passes, length, rounds

    def under(self, times: Any, changes: Any, messages: Any) -> Rounds:
        """Returns the same rounds, compiled, with other times, changes of memory and messages of experts."""
        import numpy as np

        other, (forward, backward, turned) = copy(self), self.both
        copies = forward.channel >= 0
        timed = {"duration": np.where(copies, 0.0, times), "copying": np.where(copies, times, 0.0)}
        other.both = Both(
            forward._replace(change=changes, message=messages, **timed),
            backward._replace(change=-changes, **timed),
            turned,
        )
        return other


def recosted(rounds: Rounds, schedule: Schedule, costs: StageCosts) -> Rounds:
    """Returns compiled ``rounds`` of the tasks of ``schedule`` under other ``costs`` with the same links.

    That is much faster than to number the passes again. See :meth:`.StageCosts.links_as`.
    """
    import numpy as np

    passes = list(chain.from_iterable(schedule.order))
    changes = chain.from_iterable(map(costs.changes_of, schedule.order))
    return rounds.under(
        np.array(costs.durations_of(passes)), np.array([*changes]), np.array(messages_of_tasks(passes, costs))
    )


def work_for(both: Both) -> tuple[Work, list[int]]:
    """Allocates the lists that :func:`.settle` writes, and one for the resulting order."""
    base, other, result = ([0] * len(both.turned) for _ in range(3))
    return Work(space_for(both.forward), base, other), result
