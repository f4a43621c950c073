"""The search: many climbs race on all cores, and the better half of them goes on, until one is left.

A climb list-schedules its order forward and backward in time with a little noise in the choices, lets rounds without
noise close the gaps that leaves, and goes on from the result unless it is clearly longer (iterated forward-backward
improvement with threshold acceptance).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from megatron.schedules.schedule.kinds import Kind
from megatron.schedules.search.list_scheduling import EPSILON, Policy
from megatron.schedules.search.problem import Problem, TaskOrder
from megatron.schedules.utils.cores import on_all_cores


class _Mixture(NamedTuple):
    """What the choices of a climb are drawn from."""

    patience: tuple[float, ...]
    defer: float


# No one lookahead or patience is best everywhere; a mixture is, see docs/adaptive.md. Lookaheads are in passes a rank.
_LOOKAHEADS = (1.5, 3.0, 6.0)
# Within less than one microbatch of memory, which takes recompute or offload, a microbatch has more passes and a rank
# idles unless it sees those of the next ones. With more memory so long a lookahead gives longer plans.
_SCARCE, _LOOKAHEADS_WHERE_SCARCE = 1.0, (*_LOOKAHEADS, 12.0)
_NOISE = (0.0, 0.0, 0.005, 0.01, 0.02, 0.05)
# To find a way, and to go on where it is good: ranks that wait for what is due gain more then.
_EARLY, _LATE = _Mixture((0.0, 0.5, 0.6, 1.0), 0.2), _Mixture((0.0, 0.0, 0.0, 0.5, 0.5, 0.6, 1.0), 0.05)
# As long as rounds without noise gain, and so often at most.
_INNER = 6
# How often R and L wait until all else that their I needs is there. Then more microbatches fit; a slow copy comes late.
_JUST_IN_TIME = 0.5
# How much longer than the order it came from a new one may be, as a share of a forward over half a rank's layers.
_THRESHOLD = 0.5
# A race has so many parts at most. With fewer rounds in a part a climb says nothing about what it will reach.
_MOST_PARTS, _FEWEST_ROUNDS = 5, 4


@dataclass
class Climb:
    """One order on its way: where it is, and the best it came by.

    Args:
        problem: what is scheduled.
        limit: microbatches a rank may hold.
        order: where it starts.
        seed: of everything random in it.
    """

    problem: Problem
    limit: float
    order: TaskOrder
    seed: int
    best: TaskOrder = field(init=False)
    makespan: float = field(init=False, default=float("inf"))

    def __post_init__(self) -> None:
        ranks = self.problem.placement.ranks
        self.best = self.order
        self._length = float("inf")
        self._random = random.Random(self.seed)
        scarce = self.problem.costs.saved and self.limit < _SCARCE - EPSILON
        lookaheads = _LOOKAHEADS_WHERE_SCARCE if scarce else _LOOKAHEADS
        self._lookaheads = [max(8, int(share * ranks)) for share in lookaheads]
        self._threshold = _THRESHOLD * sum(self.problem.costs.durations[Kind.F]) / (2 * ranks)

    def run(self, rounds: float, *, late: bool) -> int:
        """Spend so many rounds, or a few more to finish what was begun; how many it took."""
        taken = 0
        if self.makespan == float("inf"):  # one pass of lookahead: the order as it stands
            _, self.makespan, _ = self.problem.settled(self.order, self.limit, Policy(lookahead=1))
            taken = 1
        while taken < rounds:
            taken += self._move(_LATE if late else _EARLY)
        return taken

    def _move(self, mixture: _Mixture) -> int:
        """One move: a noisy round, then plain ones while they gain. How many rounds it took."""
        draw = self._random
        plain = Policy(draw.choice(self._lookaheads), draw.random() < mixture.defer, draw.choice(mixture.patience))
        if self.problem.costs.saved:
            plain = plain._replace(just_in_time=draw.random() < _JUST_IN_TIME)
        noisy = plain._replace(noise=draw.choice(_NOISE), seed=draw.randrange(1 << 30))
        order, length, rounds = self.problem.settled(
            self.order, self.limit, noisy, plain, backwards=draw.random() < 0.5, most=_INNER
        )
        if length <= self._length + self._threshold:
            self.order, self._length = order, length
        if length < self.makespan - EPSILON:
            self.best, self.makespan = order, length
        return rounds


class Entry(NamedTuple):
    """A problem, and the orders that its climbs start from, the likeliest first."""

    problem: Problem
    starts: Sequence[TaskOrder]


def race(entries: Sequence[Entry], limit: float, budget: float, seed: int = 0) -> tuple[list[Climb], float]:
    """Races on several problems side by side; for each the climb that got furthest, and what was spent in all.

    As many climbs on each as the budget is enough for, several from every start. They run until half of them are left
    out, and so on (successive halving); each part of a race takes as long as the others.

    Args:
        entries: what is scheduled; rounds are as many on each. Where the budget is small the last starts get no turn.
        limit: microbatches a rank may hold; every start keeps within it.
        budget: tasks to schedule in all. A count, not a time, so that the same request gives the same plan everywhere,
            on however many cores. A little more is spent where a move has begun.
        seed: of the first climb on each.
    """
    effort = sum(entry.problem.effort for entry in entries)
    sizes = _sizes(budget / effort)
    running = [
        [Climb(problem, limit, starts[number % len(starts)], seed + number) for number in range(sizes[0])]
        for problem, starts in entries
    ]
    spent = 0.0
    for part, size in enumerate(sizes):
        running = [sorted(climbs, key=lambda climb: climb.makespan)[:size] for climbs in running]
        rounds = max(2.0, (budget - spent) / effort / (len(sizes) - part) / size)
        climbs = [climb for field in running for climb in field]
        taken = on_all_cores([partial(climb.run, rounds, late=2 * part >= len(sizes)) for climb in climbs])
        spent += sum(each * climb.problem.effort for each, climb in zip(taken, climbs, strict=True))
    return [climb for (climb,) in running], spent


def _sizes(rounds: float) -> list[int]:
    """How many climbs run in each part of a race of so many rounds: half as many each time, down to one."""
    parts = _MOST_PARTS
    while parts > 1 and rounds / parts / 2 ** (parts - 1) < _FEWEST_ROUNDS:
        parts -= 1
    return [2**part for part in reversed(range(parts))]
