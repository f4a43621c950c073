"""The model and the device of a cost profile."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

from msgspec import UNSET, Meta
from msgspec.structs import asdict

from megatron.schedules.utils.json_files import Count, Form, Index, Name, Positive

# Far above any model's size, so a larger value is a typo.
MOST_LAYERS = 10_000


class CopyRates(Form, frozen=True, kw_only=False):
    """Copies between a device and its host, in 10**9 bytes a second: each way alone, and each of both at once."""

    to_host: Positive
    from_host: Positive
    both_ways: Positive


class Facts(NamedTuple):
    """The model and the conditions of a measurement.

    Args:
        device: name of the device.
        layers: decoder layers of the whole model.
        hidden_size, heads, sequence_length, micro_batch_size, tensor_parallel, context_parallel: sizes.
        vocabulary: padded number of words; 0 if unknown.
        dtype: data type of the model.
        recompute: Megatron's ``--recompute-granularity``; its recomputed forwards are part of I.
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


def copy_time(rates: CopyRates | None, held: float, *, both_ways: bool) -> float | None:
    """Milliseconds to copy ``held`` bytes one way, at the slower direction's speed.

    With ``both_ways``, the other direction is busy at the same time.
    """
    if rates is None:
        return None
    alone = min(rates.to_host, rates.from_host)
    return 1e3 * held / (1e9 * (min(alone, rates.both_ways) if both_ways else alone))


class ModelForm(Form, frozen=True, kw_only=True):
    """A model in a profile."""

    layers: Annotated[int, Meta(ge=1, le=MOST_LAYERS)]
    hidden_size: Count
    heads: Count
    sequence_length: Count
    vocabulary: Index
    recompute: Name | None = None


class FactsForm(Form, frozen=True, kw_only=True):
    """The model and the device in a profile; ``versions`` and ``date`` are for people."""

    version: int
    device: Name
    micro_batch_size: Count
    tensor_parallel: Count
    context_parallel: Count
    dtype: Name
    model: ModelForm
    versions: Any = UNSET
    date: Any = UNSET

    def facts(self) -> Facts:
        """The same as :class:`Facts`."""
        every = asdict(self) | asdict(self.model)
        return Facts(**{name: every[name] for name in Facts._fields})


def written_facts(facts: Facts) -> dict[str, Any]:
    """``facts`` as the fields of a :class:`FactsForm`."""
    every = facts._asdict()
    outside = {name: every.pop(name) for name in FactsForm.__struct_fields__ if name in every}
    return outside | {"model": ModelForm(**every)}
