"""Search for an order of microbatches of different sizes, and for the order of their passes.

It runs during training: a climb is a few calls of compiled code, which release the interpreter lock. It is limited by
a number of rounds and not by time, so every rank finds the same result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from megatron.schedules.search.climb import Climb, halved
from megatron.schedules.search.list_scheduling import Policy
from megatron.schedules.search.moves import Move, Rules, Sizes, fits, put
from megatron.schedules.search.rounds import Rounds

# Values that a climb chooses from: patience, and the probability that ranks defer weight gradients.
_PATIENCE = (0.0, 0.0, 0.5, 0.6, 1.0)
_DEFER = 0.15
# Share of moves that move microbatches, and share of these that swap two. The others move one to another position.
_MOVES, _SWAPS = 0.7, 0.6
_NOISE = 0.02
# Backward-forward rounds run while they gain, and at most this number.
_INNER = 3
# Such rounds run only if the makespan is at most this number of thresholds above the previous one.
_FAR = 4
# Number of climbs in each part of the search.
_CLIMBS = (8, 4, 2, 1)
# Patience of the two rounds that a climb starts from.
_START_PATIENCE = (0.0, 1.0)


def _drawn(seed: int, microbatches: int, lookahead: int) -> Iterator[Move]:
    """Draws moves that swap or move microbatches, or change the order of passes by a little noise."""
    n, state = microbatches, seed
    while True:
        draws = []
        for _ in range(6):
            state = (state * 1103515245 + 12345) % 2147483648
            draws.append((state // 256) / 8388608)
        patience, defer = _PATIENCE[int(draws[0] * len(_PATIENCE))], draws[1] < _DEFER
        if n > 1 and draws[2] < _MOVES:
            source, to = int(draws[3] * n), int(draws[4] * (n - 1))
            to += to >= source
            yield Move(Policy(lookahead, defer, patience), source=source, to=to, swap=draws[5] < _SWAPS)
        else:
            policy = Policy(lookahead, defer, patience, noise=_NOISE * draws[3], seed=state)
            yield Move(policy, backwards=draws[4] < 0.5)


def search(
    tasks: Rounds,
    limits: NDArray[np.float64],
    sizes: Sizes,
    orders: Sequence[Sequence[int]],
    rounds: int,
    lookahead: int,
    threshold: float,
) -> Climb | None:
    """Returns the climb to the shortest order of microbatches and of passes that it finds in ``rounds`` rounds.

    A climb starts from each order of microbatches, with the passes in the order of their numbers.

    Args:
        tasks: the tasks; their times and memory are overwritten.
        limits: memory limit of each rank.
        sizes: how times and memory depend on microbatches.
        orders: orders of microbatches to start from. Those that do not fit within the limits are skipped.
        rounds: rounds of list scheduling in total. Each part of the search has the same number.
        lookahead: passes that a rank considers.
        threshold: largest increase of the makespan with which a climb continues from a new order.

    Returns:
        The best climb; None if none of ``orders`` fits.
    """
    rules, running = Rules(threshold, _FAR * threshold, _INNER), []
    for seed, start in enumerate(orders):
        microbatches, passes = np.array(start), np.arange(len(sizes.place))
        put(tasks.both, sizes, microbatches)
        if fits(tasks.both, limits, passes):
            policies = (Policy(lookahead, patience=patience) for patience in _START_PATIENCE)
            settled = [tasks.settled(passes, limits, policy) for policy in policies]
            order, length, _ = min(settled, key=lambda result: round(result[1], 9))
            running.append(Climb(tasks.both, limits, rules, order, seed, length, sizes, microbatches))
    parts = [size for size in _CLIMBS if size <= max(1, len(running))]

    def run(part: int, climbs: Sequence[Climb]) -> None:
        each_gets = rounds // len(parts) // parts[part] - (0 if part else len(_START_PATIENCE))
        for climb in climbs:
            climb.follow(_drawn(8 * part + climb.seed, len(orders[0]), lookahead), each_gets)

    return halved([running], parts, run)[0] if running else None
