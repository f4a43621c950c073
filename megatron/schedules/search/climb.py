"""Search for a short schedule: many climbs race on all cores, and the better half continues until one is left.

A climb list-schedules its order forward and backward in time with some noise in the choices. Rounds without noise then
close the gaps. The climb continues from the result unless it is clearly longer (iterated forward-backward improvement
with threshold acceptance).
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
# Rounds without noise run while they gain, and at most this number.
_INNER = 6
# Probability that R and L wait for everything else that their I needs. More microbatches then fit, but a slow copy is
# late.
_JUST_IN_TIME = 0.5
# A new order is accepted if it is longer by at most this share of a forward over half a rank's layers.
_THRESHOLD = 0.5
# Most parts of a race. With fewer rounds in a part, a climb does not show what it can reach.
_MOST_PARTS, _FEWEST_ROUNDS = 5, 4


@dataclass
class Climb:
    """One climb: its current order and the best one found.

    Args:
        problem: the scheduling problem.
        limit: memory limit, microbatches on an average rank.
        order: the start.
        seed: random seed.
        best: shortest order found.
        makespan: makespan of ``best``.
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
        """Runs ``rounds`` rounds, or a few more to finish the last move. Returns the number of rounds."""
        taken = 0
        if self.makespan == float("inf"):  # lookahead of one pass: keeps the order
            _, self.makespan, _ = self.problem.settled(self.order, self.limit, Policy(lookahead=1))
            taken = 1
        while taken < rounds:
            taken += self._move(_LATE if late else _EARLY)
        return taken

    def _move(self, mixture: _Mixture) -> int:
        """Runs one move: a noisy round, then plain rounds while they gain. Returns the number of rounds."""
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
    """A problem and the orders that its climbs start from, the most promising first."""

    problem: Problem
    starts: Sequence[TaskOrder]


def race(entries: Sequence[Entry], limit: float, budget: float, seed: int = 0) -> tuple[list[Climb], float]:
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
    """Returns the number of climbs in each part of a race of ``rounds`` rounds: half as many each time, down to one."""
    parts = _MOST_PARTS
    while parts > 1 and rounds / parts / 2 ** (parts - 1) < _FEWEST_ROUNDS:
        parts -= 1
    return [2**part for part in reversed(range(parts))]
