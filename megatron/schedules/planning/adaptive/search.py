"""The search: climbs from several orders race, half of the budget going to the one that is ahead at half-time.

A climb plays its order forward and backward in time with a little noise in the choices, lets plain plays close the
gaps that leaves, and goes on from the result unless it is clearly longer (iterated forward-backward improvement with
threshold acceptance).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from megatron.schedules.planning.adaptive.problem import Choices, Order, Problem
from megatron.schedules.planning.play import EPSILON

# No one window or patience is best everywhere; a mixture is, see docs/adaptive.md. Windows are in passes a rank.
_WINDOWS = (1.5, 3.0, 6.0)
_PATIENCE = (0.0, 0.5, 0.6, 1.0)
_NOISE = (0.0, 0.0, 0.005, 0.01, 0.02, 0.05)
_DEFER = 0.2
# As long as plain plays gain, and so often at most.
_INNER = 3
# How much longer than the order it came from a new one may be, as a share of a forward over half a rank's layers.
_THRESHOLD = 0.5
# With fewer plays than these a climb says nothing about what it will reach.
_FEWEST_PLAYS = 8


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
    order: Order
    seed: int
    best: Order = field(init=False)
    makespan: float = field(init=False, default=float("inf"))

    def __post_init__(self) -> None:
        ranks = self.problem.placement.ranks
        self.best = self.order
        self._length = float("inf")
        self._random = random.Random(self.seed)
        self._windows = [max(8, int(share * ranks)) for share in _WINDOWS]
        self._threshold = _THRESHOLD * sum(self.problem.costs.forward) / (2 * ranks)

    def run(self, plays: float) -> int:
        """Spend so many plays, or a few more to finish what was begun; how many it took."""
        taken = 0
        if self.makespan == float("inf"):  # a window of one pass: the order as it stands
            _, self.makespan = self.problem.forward(self.order, self.limit, Choices(window=1))
            taken = 1
        while taken < plays:
            taken += self._step()
        return taken

    def _step(self) -> int:
        """One move: a noisy play, then plain ones while they gain. How many plays it took."""
        draw = self._random
        plain = Choices(draw.choice(self._windows), draw.random() < _DEFER, draw.choice(_PATIENCE))
        noisy = replace(plain, noise=draw.choice(_NOISE), seed=draw.randrange(1 << 30))
        if draw.random() < 0.5:
            turned = self.problem.backward(self.order, self.limit, noisy)
            order, length = self.problem.forward(turned, self.limit, plain)
            plays = 2
        else:
            order, length = self.problem.forward(self.order, self.limit, noisy)
            plays = 1
        for _ in range(_INNER):
            turned = self.problem.backward(order, self.limit, plain)
            again, shorter = self.problem.forward(turned, self.limit, plain)
            plays += 2
            if shorter > length - EPSILON:
                break
            order, length = again, shorter
        if length <= self._length + self._threshold:
            self.order, self._length = order, length
        if length < self.makespan - EPSILON:
            self.best, self.makespan = order, length
        return plays


def race(problem: Problem, starts: Sequence[Order], limit: float, budget: float) -> tuple[Climb, float]:
    """Climb from every start, and on from the best; the climb that got furthest, and what was spent.

    Args:
        problem: what is scheduled.
        starts: the likeliest first. Where the budget is small the last ones get no turn.
        limit: microbatches a rank may hold; every start keeps within it.
        budget: tasks to play in all. A count, not a time, so that the same request gives the same plan everywhere. A
            little more is spent where a step has begun, and on the first climb's first step.
    """
    plays = budget / problem.effort
    turns = max(1, int(plays / 2 / _FEWEST_PLAYS))
    climbs = [Climb(problem, limit, order, seed) for seed, order in enumerate(starts[:turns])]
    taken = sum(climb.run(max(2, plays / 2 / len(climbs))) for climb in climbs)
    climbs.sort(key=lambda climb: climb.makespan)
    taken += climbs[0].run(plays - taken)
    return climbs[0], taken * float(problem.effort)
