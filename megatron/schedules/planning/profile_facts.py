"""What a cost profile says of the model and the device that were measured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from megatron.schedules.planning.costs import Costs
from megatron.schedules.planning.model_memory import ModelMemory

# Far more than any model has: a slip.
MOST_LAYERS = 10_000


class CopyRates(NamedTuple):
    """Copies between a device and its host, in 10**9 bytes a second: each way alone, and each of both at once."""

    to_host: float
    from_host: float
    both_ways: float


class Facts(NamedTuple):
    """The model and how it was measured.

    Args:
        device: what it was measured on.
        layers: decoder layers of the whole model.
        hidden_size, heads, sequence_length, micro_batch_size, tensor_parallel, context_parallel: of it.
        vocabulary: words, padded; 0 where that is not known.
        dtype: of its numbers.
        recompute: Megatron's ``--recompute-granularity`` it was measured with, whose forwards are a part of I.
        name: what somebody calls the model.
    """

    device: str
    layers: int
    hidden_size: int
    heads: int
    sequence_length: int
    micro_batch_size: int
    tensor_parallel: int
    context_parallel: int = 1
    vocabulary: int = 0
    dtype: str = ""
    recompute: str | None = None
    name: str | None = None


class Profile(Protocol):
    """What measured something of a model, and says what plans need of it."""

    @property
    def facts(self) -> Facts:
        """What was measured."""
        ...

    @property
    def layer_seconds(self) -> tuple[float, float, float]:
        """F, I and W of an average decoder layer."""
        ...

    @property
    def layer_bytes(self) -> float:
        """What a microbatch's activations take in an average decoder layer from F until I; 0 where nobody counted."""
        ...

    @property
    def copy_gbps(self) -> CopyRates | None:
        """How fast activations go to the host and come back; None where that was not measured."""
        ...

    def copy_time(self, ranks: int, *, both_ways: bool = True) -> float | None:
        """Milliseconds to copy what half a rank's layers hold, one way; None where that was not measured."""
        ...

    def costs(self, ranks: int) -> Costs:
        """In milliseconds, for a pipeline of so many ranks."""
        ...

    def memory(self, planned: ModelMemory) -> ModelMemory:
        """``planned`` with what was measured in place of what was reckoned."""
        ...


def copy_time(rates: CopyRates | None, held: float, *, both_ways: bool) -> float | None:
    """Milliseconds in which ``held`` bytes are copied one way, by the slower way; ``both_ways``: both are busy."""
    if rates is None:
        return None
    return 1e3 * held / (1e9 * min(rates if both_ways else rates[:2]))


def read_facts(data: Mapping[str, Any]) -> Facts:
    """The facts in a profile's JSON; raises KeyError, TypeError and ValueError for what is none."""
    model = data["model"]
    return Facts(
        device=str(data["device"]),
        layers=int(model["layers"]),
        hidden_size=int(model["hidden_size"]),
        heads=int(model["heads"]),
        sequence_length=int(model["sequence_length"]),
        micro_batch_size=int(data["micro_batch_size"]),
        tensor_parallel=int(data["tensor_parallel"]),
        context_parallel=int(data.get("context_parallel", 1)),
        vocabulary=int(model.get("vocabulary") or 0),
        dtype=str(data.get("dtype", "")),
        recompute=None if model.get("recompute") is None else str(model["recompute"]),
        name=None if model.get("name") is None else str(model["name"]),
    )


def written_facts(facts: Facts) -> dict[str, Any]:
    """The same as what JSON is made of."""
    outside = ("device", "micro_batch_size", "tensor_parallel", "context_parallel", "dtype")
    every = facts._asdict()
    return {name: every.pop(name) for name in outside} | {"model": every}


def read_rates(measured: Mapping[str, Any]) -> CopyRates:
    """How fast copies are; raises KeyError, TypeError and ValueError for anything else."""
    found = CopyRates(*(float(measured[name]) for name in CopyRates._fields))
    if not all(0 < rate < math.inf for rate in found):
        raise ValueError("rates of copies must be positive")
    return found
