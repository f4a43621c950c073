"""What a cost profile says of the model and the device that were measured."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple, Protocol

from msgspec import UNSET, Meta

from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.model_memory import ModelMemory
from megatron.schedules.utils.json_files import Count, Form, Index, Name, Positive

# Far more than any model has: a slip.
MOST_LAYERS = 10_000
LayerCount = Annotated[int, Meta(ge=1, le=MOST_LAYERS)]


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


class RatesForm(Form, frozen=True, kw_only=True):
    """:class:`CopyRates` in a profile."""

    to_host: Positive
    from_host: Positive
    both_ways: Positive

    def rates(self) -> CopyRates:
        """The same as planning has it."""
        return CopyRates(self.to_host, self.from_host, self.both_ways)


class ModelForm(Form, frozen=True, kw_only=True):
    """A model in a profile. ``flags``, those it was built with, are for people."""

    layers: LayerCount
    hidden_size: Count
    heads: Count
    sequence_length: Count
    vocabulary: Index | None = 0
    recompute: Name | None = None
    name: Name | None = None
    flags: Any = UNSET


class FactsForm(Form, frozen=True, kw_only=True):
    """What every profile says; ``versions`` and ``date`` are for people.

    A class of its own says what is measured, and of which version it is.
    """

    version: int
    device: Name
    micro_batch_size: Count
    tensor_parallel: Count
    context_parallel: Count = 1
    dtype: Name = ""
    model: ModelForm
    versions: Any = UNSET
    date: Any = UNSET

    def facts(self) -> Facts:
        """The same as planning has it."""
        model = self.model
        return Facts(
            device=self.device,
            layers=model.layers,
            hidden_size=model.hidden_size,
            heads=model.heads,
            sequence_length=model.sequence_length,
            micro_batch_size=self.micro_batch_size,
            tensor_parallel=self.tensor_parallel,
            context_parallel=self.context_parallel,
            vocabulary=model.vocabulary or 0,
            dtype=self.dtype,
            recompute=model.recompute,
            name=model.name,
        )


def written_facts(facts: Facts) -> dict[str, Any]:
    """The fields of a :class:`FactsForm` that say ``facts``."""
    every = facts._asdict()
    outside = {name: every.pop(name) for name in FactsForm.__struct_fields__ if name in every}
    return outside | {"model": ModelForm(**every)}
