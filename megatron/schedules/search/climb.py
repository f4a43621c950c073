"""Search for a short schedule: many climbs race on all cores, and the better half continues until one is left.

A climb list-schedules its order forward and backward in time with some noise in the choices. Rounds without noise then
close the gaps. The climb continues from the result unless it is clearly longer (iterated forward-backward improvement
with threshold acceptance). :mod:`.moves` carries out the moves that are drawn here.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.schedules.schedule.kinds import Kind
from megatron.schedules.schedule.placement import Placement
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.stage_costs import StageCosts
from megatron.schedules.search import compiled
from megatron.schedules.search.forward_backward import Both
from megatron.schedules.search.list_scheduling import EPSILON, Policy
from megatron.schedules.search.moves import ALIKE, NONE, Move, Orders, Rules, Sizes
from megatron.schedules.search.problem import Problem, TaskOrder
from megatron.schedules.utils.cores import on_all_cores
from megatron.schedules.utils.progress import Progress, unheard


class _Mixture(NamedTuple):
    """Values that a climb draws its choices from."""

    patience: tuple[float, ...]
    defer: float


# A mixture of lookaheads and patiences is best, see docs/adaptive.md. Lookaheads are in passes per rank.
_LOOKAHEADS = (1.5, 3.0, 6.0)
# Memory limits below one microbatch need recompute or offload. A microbatch then has more passes, and a rank idles
# unless it considers those of the next microbatches. With more memory such a long lookahead gives longer makespans.
_SCARCE, _LOOKAHEADS_WHERE_SCARCE = 1.0, (*_LOOKAHEADS, 12.0)
_NOISE = (0.0, 0.0, 0.005, 0.01, 0.02, 0.05)
# Early, to find good orders, and late, to improve them. Late, ranks gain more if they wait for the due pass.
_EARLY, _LATE = _Mixture((0.0, 0.5, 0.6, 1.0), 0.2), _Mixture((0.0, 0.0, 0.0, 0.5, 0.5, 0.6, 1.0), 0.05)
# Weight gradients that wait can run behind messages of experts.
_DEFER_WITH_MESSAGES = 0.4
# Rounds without noise run while they gain, and at most this number.
_INNER = 6
# Probability that R and L wait for everything else that their I needs. More microbatches then fit, but a slow copy is
# late.
_JUST_IN_TIME = 0.5
# A new order is accepted if it is longer by at most this share of a forward over half a rank's layers.
_THRESHOLD = 0.5
# Most parts of a race. With fewer rounds in a part, a climb does not show what it can reach.
_MOST_PARTS, _FEWEST_ROUNDS = 5, 4
# Approximate number of rounds of a move: so many times fewer moves than rounds are drawn at once.
_USUAL_ROUNDS = 3


class Climb:
    """One climb: its current orders and the shortest ones found.

    Args:
        both: the tasks.
        limits: memory limit of each rank.
        rules: when a new order is accepted.
        passes: order of the passes to start from.
        seed: random seed of its moves.
        length: makespan of ``passes``; infinite to accept the first move.
        sizes, microbatches: sizes of the microbatches, and the order to start from; empty if all are alike.
    """

    def __init__(
        self,
        both: Both,
        limits: NDArray[np.float64],
        rules: Rules,
        passes: TaskOrder,
        seed: int,
        length: float = math.inf,
        sizes: Sizes = ALIKE,
        microbatches: NDArray[np.int64] = NONE,
    ) -> None:
        self._tasks, self._length = (both, limits, sizes, rules), length
        self._now, self._best = (Orders(microbatches.copy(), passes.copy()) for _ in range(2))
        self.seed, self.makespan = seed, length
        self._climb = compiled.compiled_climb()

    @property
    def best(self) -> TaskOrder:
        """Shortest order of the passes."""
        passes: TaskOrder = self._best.passes
        return passes

    @property
    def optimal(self) -> bool:
        """Whether no order can be shorter."""
        return self.makespan <= self._tasks[3].enough

    @property
    def microbatches(self) -> NDArray[np.int64]:
        """Microbatch at each position in the shortest order."""
        microbatches: NDArray[np.int64] = self._best.microbatches
        return microbatches

    def follow(self, moves: Iterator[Move], rounds: float) -> tuple[int, int]:
        """Carries out as many ``moves`` as take ``rounds`` rounds. Returns the number of rounds and of moves.

        More moves may be drawn than are carried out.
        """
        work, taken, done = compiled.work_for(self._tasks[0]), 0, 0
        while taken < rounds and not self.optimal:
            left, orders = float(rounds - taken), (self._now, self._length, self._best, self.makespan)
            drawn = compiled.records(islice(moves, math.ceil(left / _USUAL_ROUNDS)))
            self._length, self.makespan, *spent = self._climb(*self._tasks, drawn, left, work, *orders)
            taken, done = taken + spent[0], done + spent[1]
        return taken, done


class OrderClimb(Climb):
    """A climb from ``order`` that changes only the order of the passes.

    Its ``limit`` is the memory limit, microbatches on an average rank.
    """

    def __init__(self, problem: Problem, limit: float, order: TaskOrder, seed: int) -> None:
        self.problem, ranks = problem, problem.placement.ranks
        threshold = _THRESHOLD * sum(problem.costs.durations[Kind.F]) / (2 * ranks)
        rules = Rules(threshold, math.inf, _INNER, problem.bound(limit) + EPSILON)
        super().__init__(problem.both, problem.limits(limit), rules, order, seed)
        self._start = partial(problem.settled, order, limit, Policy(lookahead=1))  # keeps the order
        self._random = random.Random(seed)
        scarce = problem.costs.saved and limit < _SCARCE - EPSILON
        lookaheads = _LOOKAHEADS_WHERE_SCARCE if scarce else _LOOKAHEADS
        self._lookaheads = [max(8, int(share * ranks)) for share in lookaheads]

    def run(self, rounds: float, *, late: bool) -> int:
        """Runs ``rounds`` rounds, or a few more to finish the last move. Returns the number of rounds."""
        taken = 0
        if self.makespan == math.inf:
            _, self.makespan, taken = self._start()
        before, mixture = self._random.getstate(), _LATE if late else _EARLY
        if self.problem.costs.has_messages:
            mixture = mixture._replace(defer=_DEFER_WITH_MESSAGES)
        spent, done = self.follow(self._drawn(mixture), rounds - taken)
        # The next run draws the moves that were not carried out, perhaps from another mixture.
        self._random.setstate(before)
        for _ in islice(self._drawn(mixture), done):
            pass
        return taken + spent

    def _drawn(self, mixture: _Mixture) -> Iterator[Move]:
        draw = self._random
        while True:
            lookahead, defer = draw.choice(self._lookaheads), draw.random() < mixture.defer
            patience = draw.choice(mixture.patience)
            just_in_time = self.problem.costs.saved and draw.random() < _JUST_IN_TIME
            noise, seed = draw.choice(_NOISE), draw.randrange(1 << 30)
            backwards = draw.random() < 0.5
            yield Move(Policy(lookahead, defer, patience, False, noise, seed, just_in_time), backwards)


def halved[Each: Climb](
    fields: Sequence[Sequence[Each]], sizes: Sequence[int], run: Callable[[int, Sequence[Each]], object]
) -> list[Each]:
    """Returns the best climb of each field, after parts that each drop the longest climbs (successive halving).

    Args:
        fields: climbs that compete with each other.
        sizes: number of climbs of each field in every part; the last is 1.
        run: runs the climbs of all fields in a part, given its number.
    """
    for part, size in enumerate(sizes):
        fields = [sorted(climbs, key=lambda climb: climb.makespan)[:size] for climbs in fields]
        run(part, [climb for field in fields for climb in field])
    return [climb for (climb,) in fields]


class Entry(NamedTuple):
    """A problem and the orders that its climbs start from, the most promising first."""

    problem: Problem
    starts: Sequence[TaskOrder]


def race(entries: Sequence[Entry], limit: float, budget: float, seed: int = 0) -> tuple[list[OrderClimb], float]:
    """Runs races on several problems in parallel. Returns the best climb of each, and the total effort.

    Each problem gets as many climbs as the budget allows, several from every start. After each part of the race half of
    the climbs are dropped (successive halving). All parts take equally long.

    Args:
        entries: problems, each with the same number of rounds. With a small budget the last starts are not used.
        limit: memory limit, microbatches on an average rank. Every start keeps within it.
        budget: tasks to schedule in total. A count and not a time, so that the same request gives the same plan on any
            machine. The last moves may exceed it a little.
        seed: random seed of the first climb of each problem.
    """
    effort = sum(entry.problem.effort for entry in entries)
    sizes = _sizes(budget / effort)
    fields = [
        [OrderClimb(problem, limit, starts[number % len(starts)], seed + number) for number in range(sizes[0])]
        for problem, starts in entries
    ]
    spent = 0.0

    def run(part: int, climbs: Sequence[OrderClimb]) -> None:
        nonlocal spent
        rounds = max(2.0, (budget - spent) / effort / (len(sizes) - part) / sizes[part])
        optimal = {climb.problem for climb in climbs if climb.optimal}
        left = [climb for climb in climbs if climb.problem not in optimal]
        taken = on_all_cores([partial(climb.run, rounds, late=2 * part >= len(sizes)) for climb in left])
        # A climb that ended early counts as the others: what they get does not depend on it.
        spent += sum(max(rounds, ran) * climb.problem.effort for ran, climb in zip(taken, left, strict=True))
        spent += sum(rounds * climb.problem.effort for climb in climbs if climb.problem in optimal)

    return halved(fields, sizes, run), spent


def _sizes(rounds: float) -> list[int]:
    """Returns the number of climbs in each part of a race of ``rounds`` rounds: half as many each time, down to one."""
    parts = _MOST_PARTS
    while parts > 1 and rounds / parts / 2 ** (parts - 1) < _FEWEST_ROUNDS:
        parts -= 1
    return [2**part for part in reversed(range(parts))]


def contest(entries: Sequence[Entry], limit: float, passes: float, progress: Progress = unheard) -> list[OrderClimb]:
    """Runs one race of climbs on all problems. Returns the best climb of each.

    A climb starts from each start of each problem. After each part the longer half of all climbs is dropped, so most of
    the effort goes to the most promising problems. A problem whose bound is above the shortest makespan gets no more.

    Args:
        entries: the problems; each has a start.
        limit: memory limit, microbatches on an average rank. Every start keeps within it.
        passes: tasks to schedule in total; all parts get equally many.
        progress: receives the progress of the race.
    """
    climbs = [[OrderClimb(each, limit, start, seed) for seed, start in enumerate(starts)] for each, starts in entries]
    field = [climb for each in climbs for climb in each]
    sizes = [math.ceil(len(field) / 2**part) for part in range((len(field) - 1).bit_length() + 1)]

    def run(part: int, left: Sequence[OrderClimb]) -> None:
        rounds = max(2.0, passes / len(sizes) / sum(climb.problem.effort for climb in left))
        worth = left[0].makespan - EPSILON
        hopeful = [climb for climb in left if climb.problem.bound(limit) < worth]
        on_all_cores([partial(climb.run, rounds, late=2 * part >= len(sizes)) for climb in hopeful])
        progress(1 / len(sizes))

    halved([field], sizes, run)
    return [min(each, key=lambda climb: climb.makespan) for each in climbs]


class Trials:
    """Climbs that start from one microbatch after another, and from the best order of the previous climbs.

    Args:
        limit: memory limit, microbatches on an average rank.
        rounds: rounds of a climb from each start.
    """

    def __init__(self, placement: Placement, microbatches: int, limit: float, rounds: float) -> None:
        self._placement, self._microbatches, self._limit, self._rounds = placement, microbatches, limit, rounds
        self._problem: Problem | None = None
        self._best: tuple[Problem, TaskOrder] | None = None
        self._length = math.inf

    @property
    def schedule(self) -> Schedule | None:
        """Shortest schedule found, with every backward split; None if there is none."""
        if self._best is None:
            return None
        problem, order = self._best
        return replace(problem.schedule, name="adaptive", order=problem.rows(order))

    def entry(self, costs: StageCosts) -> Entry:
        """Returns the problem under ``costs``, with the starts that fit."""
        problem = self._problem and self._problem.under(costs)
        if problem is None:
            problem = self._problem = Problem(self._placement, self._microbatches, costs)
        one_by_one = problem.order()
        best = problem.taken_over(*self._best) if self._best else one_by_one
        return Entry(problem, [order for order in (best, one_by_one) if problem.fits(order, self._limit)])

    def learn(self, climb: OrderClimb) -> None:
        """Makes the order of ``climb`` the next start if it is the shortest so far."""
        if climb.makespan < self._length:
            self._best, self._length = (climb.problem, climb.best), climb.makespan

    def climb(self, entry: Entry) -> OrderClimb | None:
        """Climbs from the starts of ``entry``; returns None if it has none. It learns nothing."""
        if not entry.starts:
            return None
        (climb,), _ = race([entry], self._limit, self._rounds * len(entry.starts) * entry.problem.effort)
        return climb

    def makespan(self, costs: StageCosts) -> float:
        """Returns the makespan that a climb finds under ``costs``; infinite if nothing fits."""
        climb = self.climb(self.entry(costs))
        if climb is None:
            return math.inf
        self.learn(climb)
        return climb.makespan
