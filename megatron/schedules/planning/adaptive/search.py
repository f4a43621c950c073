"""The search: climbs from several orders race, half of the budget going to the one that is ahead at half-time.

A climb list-schedules its order forward and backward in time with a little noise in the choices, lets rounds without
noise close the gaps that leaves, and goes on from the result unless it is clearly longer (iterated forward-backward
improvement with threshold acceptance).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron.schedules.planning.adaptive.problem import Problem, TaskOrder
from megatron.schedules.planning.kinds import Kind
from megatron.schedules.planning.list_scheduling import EPSILON, Policy

# No one lookahead or patience is best everywhere; a mixture is, see docs/adaptive.md. Lookaheads are in passes a rank.
_LOOKAHEADS = (1.5, 3.0, 6.0)
_PATIENCE = (0.0, 0.5, 0.6, 1.0)
_NOISE = (0.0, 0.0, 0.005, 0.01, 0.02, 0.05)
_DEFER = 0.2
# As long as rounds without noise gain, and so often at most.
_INNER = 3
# How much longer than the order it came from a new one may be, as a share of a forward over half a rank's layers.
_THRESHOLD = 0.5
# With fewer rounds than these a climb says nothing about what it will reach.
_FEWEST_ROUNDS = 8


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
        self._lookaheads = [max(8, int(share * ranks)) for share in _LOOKAHEADS]
        self._threshold = _THRESHOLD * sum(self.problem.costs.durations[Kind.F]) / (2 * ranks)

    def run(self, rounds: float) -> int:
        """Spend so many rounds, or a few more to finish what was begun; how many it took."""
        taken = 0
        if self.makespan == float("inf"):  # one pass of lookahead: the order as it stands
            _, self.makespan = self.problem.forward(self.order, self.limit, Policy(lookahead=1))
            taken = 1
        while taken < rounds:
            taken += self._move()
        return taken

    def _move(self) -> int:
        """One move: a noisy round, then plain ones while they gain. How many rounds it took."""
        draw = self._random
        plain = Policy(draw.choice(self._lookaheads), draw.random() < _DEFER, draw.choice(_PATIENCE))
        noisy = plain._replace(noise=draw.choice(_NOISE), seed=draw.randrange(1 << 30))
        if draw.random() < 0.5:
            back = self.problem.backward(self.order, self.limit, noisy)
            order, length = self.problem.forward(back, self.limit, plain)
            rounds = 2
        else:
            order, length = self.problem.forward(self.order, self.limit, noisy)
            rounds = 1
        for _ in range(_INNER):
            back = self.problem.backward(order, self.limit, plain)
            again, shorter = self.problem.forward(back, self.limit, plain)
            rounds += 2
            if shorter > length - EPSILON:
                break
            order, length = again, shorter
        if length <= self._length + self._threshold:
            self.order, self._length = order, length
        if length < self.makespan - EPSILON:
            self.best, self.makespan = order, length
        return rounds


def race(problem: Problem, starts: Sequence[TaskOrder], limit: float, budget: float) -> tuple[Climb, float]:
    """Climb from every start, and on from the best; the climb that got furthest, and what was spent.

    Args:
        problem: what is scheduled.
        starts: the likeliest first. Where the budget is small the last ones get no turn.
        limit: microbatches a rank may hold; every start keeps within it.
        budget: tasks to schedule in all. A count, not a time, so that the same request gives the same plan everywhere.
            A little more is spent where a move has begun, and on the first climb's first move.
    """
    rounds = budget / problem.effort
    turns = max(1, int(rounds / 2 / _FEWEST_ROUNDS))
    climbs = [Climb(problem, limit, order, seed) for seed, order in enumerate(starts[:turns])]
    taken = sum(climb.run(max(2, rounds / 2 / len(climbs))) for climb in climbs)
    climbs.sort(key=lambda climb: climb.makespan)
    taken += climbs[0].run(rounds - taken)
    return climbs[0], taken * float(problem.effort)
