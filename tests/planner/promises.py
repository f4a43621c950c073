"""How much memory each named schedule says it needs."""

from __future__ import annotations

from collections.abc import Callable

# Microbatches' worth of activations that a rank holds at most, by the number of ranks.
_MOST: dict[str, Callable[[int], float]] = {
    "1f1b": lambda d: d,
    "eager-1f1b": lambda d: 2 * d - 1,
    "interleaved-1f1b": lambda d: (3 * d - 1) / 2,  # two chunks: 2 (d - 1) + d + 1 passes over half a rank's layers
    "zb-1p": lambda d: d,
    "zb-2p": lambda d: 2 * d,
    "1f1b-v": lambda d: 2 * d // 3 + 1,
    "v-min": lambda d: (d + 4) // 3,
    "v-half": lambda d: d // 2 + 1,
    "v-zb": lambda d: d,
}


def promised_memory(name: str, ranks: int, microbatches: float = float("inf")) -> float:
    """At most this many microbatches' worth; with few of them all there are."""
    return min(microbatches, _MOST[name](ranks))
