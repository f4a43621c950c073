"""A schedule as numbered tasks in flat arrays, the form in which orders are timed and improved.

The arrays are Python's own, which are much smaller than lists of numbers. A plan may have millions of passes.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, chain, count, pairwise, repeat
from operator import neg, sub
from typing import TYPE_CHECKING, Any

from megatron.schedules.schedule.kinds import COMPUTING, KINDS, SAVING, Kind, Pass, Resource
from megatron.schedules.schedule.schedule import Rows, Schedule, awaited, gradients_complete, slots
from megatron.schedules.schedule.stage_costs import StageCosts
from megatron.schedules.search.forward_backward import Both
from megatron.schedules.search.list_scheduling import IS_W, NEVER, NO_W, Instance
from megatron.schedules.utils.errors import PlanError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def whole(numbers: Iterable[int]) -> array[int]:
    """Returns an array of integers."""
    return array("q", numbers)


def fractions(numbers: Iterable[float]) -> array[float]:
    """Returns an array of floats."""
    return array("d", numbers)


def flags(values: Iterable[bool]) -> array[int]:
    """Returns an array of booleans, a byte each."""
    return array("b", values)


def _as_list(numbers: array[Any]) -> list[Any]:
    """Returns a list in which equal fractions are one object."""
    if numbers.typecode != "d":
        return numbers.tolist()
    one: dict[float, float] = {}
    return list(map(one.setdefault, numbers, numbers))


@dataclass(frozen=True)
class Links:
    """Precedences of each task: the tasks at the other end, and the delay between.

    Those of task t are at ``start[t]`` up to, but not including, ``start[t + 1]``.

    Args:
        start: index of the first precedence of each task.
        task: task at the other end of each precedence.
        delay: time between the end of one task and the start of the other.
    """

    start: array[int]
    task: array[int]
    delay: array[float]

    def turned(self) -> Links:
        """Returns the same precedences by the task at the other end, in ascending order of task numbers."""
        counts = [0] * len(self.start)
        for task in self.task:
            counts[task + 1] += 1
        free = list(accumulate(counts))
        start, tasks, delays = whole(free), self.task[:], self.delay[:]
        others = chain.from_iterable(map(repeat, count(), self.counts))
        for other, task, delay in zip(others, self.task, self.delay, strict=True):
            place = free[task]
            free[task] = place + 1
            tasks[place] = other
            delays[place] = delay
        return Links(start, tasks, delays)

    @property
    def counts(self) -> array[int]:
        """Number of precedences of each task."""
        return whole(map(sub, self.start[1:], self.start))


@dataclass(frozen=True)
class Tasks:
    """The tasks of a schedule and their constraints, without their order.

    Args:
        first: tasks of rank r have numbers ``first[r]`` up to, but not including, ``first[r + 1]``, in the schedule's
            order.
        rank: rank of each task.
        duration: computing time of each task; 0 for a copy.
        change: activation memory that each task allocates at its start or, if negative, frees at its end; in
            microbatches.
        filler: true if no other task waits for the task, as for a W.
        steady: true if the task comes before the last forward of its rank.
        channel: copy channel that the task uses, numbered over all ranks; -1 for a task that computes.
        copying: time of each copy; 0 for a task that computes.
        returns: with recompute and offload, the next task towards freeing the memory that this task allocated: O after
            F, I after R or L, W after that I; -1 for all others. With time running backwards each link is reversed.
        opens: true if the copy starts at the task's position. Otherwise the copy starts as early as possible and ends
            at the task's position at the latest.
        before: tasks that each task waits for.
        after: tasks that wait for each task.
        message: time of each task's messages of experts, behind which weight gradients may run; empty without such
            messages, and with time running backwards.
        weights: the W of each I, and marks, see :class:`.Instance`; empty without such messages.
        stage: stage of each task; empty without such messages.
    """

    first: array[int]
    rank: array[int]
    duration: array[float]
    change: array[float]
    filler: array[int]
    steady: array[int]
    channel: array[int]
    copying: array[float]
    opens: array[int]
    returns: array[int]
    before: Links
    after: Links
    message: array[float] = field(default_factory=lambda: fractions(()))
    weights: array[int] = field(default_factory=lambda: whole(()))
    stage: array[int] = field(default_factory=lambda: whole(()))

    def reversed(self) -> Tasks:
        """Returns the same tasks with time running backwards."""
        change = fractions(map(neg, self.change))
        opens = flags(c >= 0 and not o for c, o in zip(self.channel, self.opens, strict=True))
        returns = whole([-1]) * len(self.returns)
        for task, other in enumerate(self.returns):
            if other >= 0:
                returns[other] = task
        turned = replace(self, change=change, opens=opens, returns=returns, before=self.after, after=self.before)
        return replace(turned, message=fractions(()))

    def reversed_order(self, order: Sequence[int]) -> array[int]:
        """Returns ``order`` with each rank's part reversed."""
        return whole(chain.from_iterable(order[start:end][::-1] for start, end in pairwise(self.first)))

    def weights_in_turn(self, order: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns ``order`` with the W's of each rank in the order of their I's, at the same positions."""
        import numpy as np

        weights, order = np.asarray(self.weights), order.copy()
        for start, end in pairwise(self.first):
            row = order[start:end]
            partners = weights[row]
            row[partners == IS_W] = partners[partners >= 0]
        return order

    @cached_property
    def both(self) -> Both:
        """Both directions of time in lists, which Python reads fastest; equal numbers are one object."""
        return self._both(_as_list)

    @cached_property
    def arrays(self) -> Both:
        """Both directions of time in arrays, for compiled code."""
        import numpy as np

        def converted(column: array[Any]) -> Any:
            made = np.asarray(column)
            return made.view(np.bool_) if made.dtype == np.int8 else made

        return self._both(converted)

    def _both(self, converted: Callable[[array[Any]], Any]) -> Both:
        """Returns both directions of time. Converts a column that they share once."""
        directions = self._fields, self.reversed()._fields
        columns = {id(column): column for column in chain(*directions)}
        made = {key: converted(column) for key, column in columns.items()}
        forward, backward = (Instance(*(made[id(column)] for column in fields)) for fields in directions)
        return Both(forward, backward, converted(self.reversed_order(range(len(self.rank)))))

    @property
    def _fields(self) -> Sequence[array[Any]]:
        """Fields of :class:`.Instance`."""
        links = self.after
        of_tasks = (self.first, self.rank, self.duration, self.change, self.filler, self.steady)
        copies = (self.channel, self.copying, self.opens)
        returned = flags([False]) * len(self.rank)
        for task in set(self.returns) - {-1}:
            returned[task] = True
        of_links = (self.before.counts, links.start, links.task, links.delay)
        return (*of_tasks, *copies, *of_links, self.returns, returned, self.message, self.weights, self.stage)

    def rows(self, order: Sequence[int] | NDArray[np.int64], passes: Sequence[Pass]) -> Rows:
        """Returns ``order`` as the rows of a schedule, given the pass of each task."""
        numbers = order if isinstance(order, Sequence) else order.tolist()
        return tuple(tuple(passes[task] for task in numbers[start:end]) for start, end in pairwise(self.first))


def tasks_of(schedule: Schedule, costs: StageCosts) -> tuple[Tasks, list[Pass]]:
    """Numbers the passes of ``schedule`` rank by rank in its order. Returns the tasks, and the pass of each number.

    Raises:
        PlanError: if the sum of all times is too large.
    """
    passes = list(chain.from_iterable(schedule.order))
    placement = schedule.placement
    rank_of, durations = placement.rank_of, costs.durations_of(passes)
    before = _before(schedule, passes, costs)
    if not sum(durations) + sum(before.delay) < NEVER:
        raise PlanError("passes and P2P latencies are too long to be planned for: give costs in a larger unit", "costs")
    steady = flags(())
    for row in schedule.order:
        last_forward = next((place for place in reversed(range(len(row))) if row[place].kind is Kind.F), 0)
        steady += flags([True]) * last_forward + flags([False]) * (len(row) - last_forward)
    duration, copying = fractions(durations), fractions([0.0]) * len(passes)
    channel, opens = whole([-1]) * len(passes), flags([False]) * len(passes)
    copies = schedule.kinds - COMPUTING
    for task, (stage, kind, _) in enumerate(passes if copies else ()):
        if kind in copies:
            resource = KINDS[kind].resource
            duration[task], copying[task] = 0.0, duration[task]
            channel[task] = 2 * rank_of[stage] + (resource is Resource.TO_HOST and not costs.one_way)
            opens[task] = resource is Resource.FROM_HOST
    fills = {kind: KINDS[kind].filler for kind in schedule.kinds}
    tasks = Tasks(
        first=whole(accumulate(map(len, schedule.order), initial=0)),
        rank=whole([rank_of[stage] for stage, _, _ in passes]),
        duration=duration,
        change=fractions(chain.from_iterable(map(costs.changes_of, schedule.order))),
        filler=flags([fills[kind] for _, kind, _ in passes]),
        steady=steady,
        channel=channel,
        copying=copying,
        opens=opens,
        returns=_returns(schedule, passes),
        before=before,
        after=before.turned(),
        message=fractions(messages_of_tasks(passes, costs)),
        weights=_weights(passes) if costs.has_messages else whole(()),
        stage=whole((stage for stage, _, _ in passes) if costs.has_messages else ()),
    )
    return tasks, passes


def _returns(schedule: Schedule, passes: Sequence[Pass]) -> array[int]:
    """Returns :attr:`Tasks.returns` of ``passes``."""
    returns = whole([-1]) * len(passes)
    saving = schedule.kinds.intersection(SAVING)
    number = {work: index for index, work in enumerate(passes)} if saving else {}
    for work in number:
        if work.kind in saving:
            around = (work.kind, Kind.I, Kind.W) if KINDS[work.kind].takes else (Kind.F, work.kind)
            chain = [number[related] for kind in around if (related := work._replace(kind=kind)) in number]
            for task, other in pairwise(chain):
                returns[task] = other
    return returns


def messages_of_tasks(passes: Sequence[Pass], costs: StageCosts) -> list[float]:
    """Returns :attr:`Tasks.message` of ``passes``. Nothing runs behind the messages of a whole backward."""
    if not costs.has_messages:
        return []
    times = zip(passes, costs.messages_of(passes), strict=True)
    return [0.0 if KINDS[work.kind].parts else time for work, time in times]


def _weights(passes: Sequence[Pass]) -> array[int]:
    """Returns :attr:`Tasks.weights` of ``passes``."""
    number = {(stage, m): index for index, (stage, kind, m) in enumerate(passes) if kind is Kind.W}
    return whole(
        IS_W if kind is Kind.W else number.get((stage, m), NO_W) if kind is Kind.I else NO_W
        for stage, kind, m in passes
    )


def _before(schedule: Schedule, passes: Sequence[Pass], costs: StageCosts) -> Links:
    """Returns the precedences of ``passes``: the tasks that each one waits for.

    If microbatches differ, they cannot be renumbered later (:func:`.schedule.in_microbatch_order`). So a pass then also
    waits for the pass of the same kind and stage of the previous microbatch. The order in which a rank completes the
    gradients of its stages is fixed too: data-parallel replicas, each with its own microbatches, reduce them together.
    """
    places, needed = slots(schedule.placement, schedule.microbatches), awaited(schedule, costs.latency, own=True)
    number: list[int | None] = [None] * (len(KINDS) * schedule.placement.stages * schedule.microbatches)
    for index, (stage, kind, m) in enumerate(passes):
        number[places[kind][stage] + m] = index
    start, tasks, delays = whole([0]), list[int](), list[float]()
    completed = _completed_before(schedule) if costs.loads is not None else {}
    for index, (stage, kind, m) in enumerate(passes):
        for place, delay in needed[kind][stage]:
            other = number[place + m]
            if other is not None:
                tasks.append(other)
                delays.append(delay)
        if costs.loads is not None:
            last = number[places[kind][stage] + m - 1] if m else None
            own = [task for task in (last, completed.get(index)) if task is not None]
            tasks.extend(own)
            delays.extend([0.0] * len(own))
        start.append(len(tasks))
    return Links(start, whole(tasks), fractions(delays))


def _completed_before(schedule: Schedule) -> dict[int, int]:
    """For each pass that completes the gradients of a stage, finds the previous such pass on its rank; by number."""
    previous: dict[int, int] = {}
    for first, row in zip(accumulate(map(len, schedule.order), initial=0), schedule.order, strict=False):
        completing = sorted(first + index for index in gradients_complete(row).values())
        previous |= {later: earlier for earlier, later in pairwise(completing)}
    return previous
