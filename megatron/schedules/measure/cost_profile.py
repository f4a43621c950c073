"""Cost files: profiles of one chunk by ``tools/profile_passes.py``, costs written by hand, and the reader of all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, UnsetType

from megatron.schedules.measure import job_profile_json
from megatron.schedules.measure.job_profile import JobProfile
from megatron.schedules.measure.job_profile_json import VERSION
from megatron.schedules.measure.profile_facts import (
    CopyRates,
    Facts,
    FactsForm,
    LayerCount,
    copy_time,
)
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.model_loads import Load, ModelLoads, Part
from megatron.schedules.schedule.model_memory import ModelMemory
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.json_files import Amount, Count, Form, Portion, Positive, check_version, decode, read_file

_CUSTOM = 3
_Slices = Annotated[tuple[Amount, ...], Meta(min_length=1)]


class CustomCosts(Form, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Cost file written by hand, see docs/costs.md; every field but the version may be left out.

    Args:
        version: tells such files from measured ones.
        forward, input_grad, weight_grad: time over half a rank's layers, in any unit; all three or none.
        latency: of a message between ranks, in the same unit.
        messages: parts of forward and of input_grad in which a rank waits for messages of its experts.
        stage_weights: relative stage costs, for equal slices of the model in model order.
        stage_activations: the same for activation memory.
        weight_share: activation memory that an input gradient leaves to its weight gradient.
        recompute_share: part of the forward that Megatron's own recompute repeats in every input gradient.
        kept_share: part of the activation memory that a forward then leaves.
        layer_input_share: part of a layer's activation memory that remains where the plan recomputes it.
        copy_time: to copy the activations of half a rank's layers one way.
        one_way: whether a rank copies in one direction at a time.
        ranks_per_link: ranks that share a link to the host.
    """

    version: Literal[3]
    forward: Positive | None = None
    input_grad: Positive | None = None
    weight_grad: Positive | None = None
    latency: Amount | None = None
    messages: tuple[Amount, Amount] | None = None
    stage_weights: _Slices | None = None
    stage_activations: _Slices | None = None
    weight_share: Annotated[float, Meta(ge=0, le=100)] | None = None
    recompute_share: Portion | None = None
    kept_share: Portion | None = None
    layer_input_share: Portion | None = None
    copy_time: Positive | None = None
    one_way: bool = False
    ranks_per_link: Count = 1

    @property
    def times(self) -> Costs | None:
        """F, I, W, latency and messages; None where the file does not have them."""
        if self.forward is None or self.input_grad is None or self.weight_grad is None:
            return None
        messages = self.messages or (0.0, 0.0)
        return Costs(self.forward, self.input_grad, self.weight_grad, self.latency or 0.0, messages=messages)

    @property
    def of_memory(self) -> tuple[str, ...]:
        """Fields in the file about memory, which a model's sizes determine too."""
        every = "stage_activations", "weight_share", "kept_share", "layer_input_share"
        return tuple(name for name in every if getattr(self, name) is not None)

    def added_to(self, costs: Costs) -> Costs:
        """Adds the fields other than times to ``costs``."""
        fields: dict[str, Any] = {
            "stage_weights": self.stage_weights,
            "stage_activations": self.stage_activations,
            "weight_share": self.weight_share,
            "stock_recompute": self.recompute_share,
            "kept": self.kept_share,
            "layer_input": self.layer_input_share,
            "copy": None if self.copy_time is None else self.copy_time * self.ranks_per_link,
        }
        if self.recompute_share is not None:
            costs = replace(costs, recomputed_layers=None)  # the share is that of a whole stage
        return replace(costs, one_way=self.one_way, **{name: at for name, at in fields.items() if at is not None})


def read_custom(text: str) -> CustomCosts:
    """Reads :class:`CustomCosts`; raises :class:`.PlanError`, which begins with the field."""
    found = decode(text, CustomCosts)
    named = [name for name in ("forward", "input_grad", "weight_grad") if getattr(found, name) is not None]
    if named and len(named) < 3:
        raise PlanError(f"$ has {' and '.join(named)}: give forward, input_grad and weight_grad together")
    for name in ("latency", "messages"):
        if getattr(found, name) is not None and not named:
            raise PlanError(f"$.{name} goes with forward, input_grad and weight_grad, which are missing")
    if found.stage_weights is not None and not any(found.stage_weights):
        raise PlanError("$.stage_weights must have one that is above zero")
    if found.copy_time is None and (found.one_way or found.ranks_per_link > 1):
        raise PlanError(f"$.{'one_way' if found.one_way else 'ranks_per_link'} goes with copy_time, which is missing")
    found.added_to(found.times or Costs())  # reject costs that cannot be planned with
    return found


_WRITERS = "tools/profile_passes.py and --pipeline-measure write such files"


@dataclass(frozen=True)
class CostProfile:
    """One chunk of decoder layers, measured on one device.

    Args:
        facts: the model and the device.
        layers: decoder layers of the chunk.
        seconds: median times of the chunk's F, I and W.
        activation_bytes: bytes from F to I.
        weight_bytes: the part of these that stays until W.
        ends: loads of the embedding and of the output layer with its loss; None if not measured.
        copy_gbps: speed of copies; None if not measured.
        recompute: the chunk's recompute time over F's, and its input over ``activation_bytes``; None if not measured.
    """

    facts: Facts
    layers: int
    seconds: tuple[float, float, float]
    activation_bytes: float
    weight_bytes: float
    ends: tuple[Load, Load] | None = None
    copy_gbps: CopyRates | None = None
    recompute: tuple[float, float] | None = None

    @property
    def layer_seconds(self) -> tuple[float, float, float]:
        """F, I and W of one layer."""
        forward, input_grad, weight_grad = (each / self.layers for each in self.seconds)
        return forward, input_grad, weight_grad

    @property
    def layer_bytes(self) -> float:
        """Bytes of a microbatch's activations in an average decoder layer from F to I; 0 if not measured."""
        return self.activation_bytes / self.layers

    @property
    def model(self) -> ModelLoads | None:
        """Measured layers, embedding and output layer; None if the latter two were not measured."""
        if self.ends is None:
            return None
        first, last = (Part(whole=end) for end in self.ends)
        layer = Part(split=Load(*self.layer_seconds, self.layer_bytes))
        # Under vocabulary parallelism half of the single-precision logits are kept.
        return ModelLoads(first, (layer,) * self.facts.layers, last, kept_for_output=(0.0, last.held / 2))

    def copy_time(self, ranks: int, *, both_ways: bool = True) -> float | None:
        """Milliseconds to copy the activations of half a rank's layers one way; None if not measured."""
        held = self.layer_bytes * self.facts.layers / (2 * ranks)
        return copy_time(self.copy_gbps, held, both_ways=both_ways)

    def costs(self, ranks: int) -> Costs:
        """Costs in milliseconds for a pipeline of ``ranks`` ranks, without P2P latency, which was not measured."""
        scale = 1e3 * self.facts.layers / (2 * ranks)
        forward, input_grad, weight_grad = (scale * each for each in self.layer_seconds)
        share = self.weight_bytes / self.activation_bytes if self.activation_bytes else 1.0
        costs = Costs(
            forward, input_grad, weight_grad, weight_share=share, model=self.model, copy=self.copy_time(ranks) or 0.0
        )
        if self.recompute is None:
            return costs
        time, layer_input = self.recompute
        return replace(costs, recompute_time=time, layer_input=layer_input)

    def memory(self, planned: ModelMemory) -> ModelMemory:
        """Returns ``planned`` with measured bytes instead of estimated ones."""
        if not self.layer_bytes:
            return planned
        return planned.measured(
            (self.layer_bytes,) * len(planned.layers),
            self.weight_bytes / self.activation_bytes,
            None if self.recompute is None else self.recompute[1] * self.layer_bytes,
            None if self.ends is None else (self.ends[0].held, self.ends[1].held),
            recomputed=self.facts.recompute is not None,
        )


class TimedForm[Time](Form, frozen=True, kw_only=True):
    """A median time in seconds; ``low`` and ``high`` are for people."""

    median: Time
    low: Any = UNSET
    high: Any = UNSET


class EndForm(Form, frozen=True, kw_only=True):
    """The embedding or the output layer; ``weight_bytes`` is for people."""

    forward: TimedForm[Amount]
    input_grad: TimedForm[Amount]
    weight_grad: TimedForm[Amount]
    activation_bytes: Amount
    weight_bytes: Any = UNSET

    def load(self) -> Load:
        """The same as :class:`.Load`."""
        return Load(self.forward.median, self.input_grad.median, self.weight_grad.median, self.activation_bytes)


class ChunkForm(Form, frozen=True, kw_only=True):
    """A chunk of decoder layers; ``recompute`` and ``input_bytes`` come together."""

    layers: LayerCount
    forward: TimedForm[Positive]
    input_grad: TimedForm[Positive]
    weight_grad: TimedForm[Positive]
    activation_bytes: Amount
    weight_bytes: Amount
    recompute: TimedForm[Positive] | UnsetType = UNSET
    input_bytes: Amount | UnsetType = UNSET


class ChunkProfileForm(FactsForm, frozen=True, kw_only=True):
    """:class:`CostProfile` in a file; ``embedding`` and ``output_layer`` come together."""

    chunk: ChunkForm
    output_layer: EndForm | UnsetType = UNSET
    embedding: EndForm | UnsetType = UNSET
    copy_gbps: CopyRates | UnsetType = UNSET


Profile = CostProfile | JobProfile
"""Measured costs of a model, as plans need them."""


def read_profile(path: Path) -> Profile:
    """Reads a profile of one chunk, or of a whole job.

    Raises:
        PlanError: what is wrong with the file.
    """
    return read_file(path, "costs_file", "cost profile", _WRITERS, _profile)


def read_costs(path: Path) -> Profile | CustomCosts:
    """Reads a cost file: a profile, or costs written by hand.

    Raises:
        PlanError: what is wrong with the file.
    """
    return read_file(path, "costs_file", "cost file", f"{_WRITERS}; docs/costs.md has those written by hand", _costs)


def _costs(text: str) -> Profile | CustomCosts:
    return read_custom(text) if check_version(text, *_READERS, _CUSTOM) == _CUSTOM else _profile(text)


def _profile(text: str) -> Profile:
    found = _READERS[check_version(text, *_READERS)](text)
    found.costs(1)  # reject costs that cannot be planned with
    return found


def from_text(text: str) -> CostProfile:
    """Reads a :class:`ChunkProfileForm`; raises :class:`.PlanError`, which begins with the field, for anything else."""
    form = decode(text, ChunkProfileForm)
    chunk, output, embedding, rates = form.chunk, form.output_layer, form.embedding, form.copy_gbps
    if chunk.layers > form.model.layers:
        raise PlanError(f"$.chunk.layers must be {form.model.layers} at most, as $.model.layers, not {chunk.layers}")
    if output is not UNSET and embedding is UNSET:
        raise PlanError("$ lacks 'embedding', and has an output layer")
    return CostProfile(
        facts=form.facts(),
        layers=chunk.layers,
        seconds=(chunk.forward.median, chunk.input_grad.median, chunk.weight_grad.median),
        activation_bytes=chunk.activation_bytes,
        weight_bytes=chunk.weight_bytes,
        ends=None if output is UNSET or embedding is UNSET else (embedding.load(), output.load()),
        copy_gbps=None if rates is UNSET else rates,
        recompute=_recompute(chunk),
    )


def _recompute(chunk: ChunkForm) -> tuple[float, float] | None:
    if chunk.recompute is UNSET:
        return None
    if chunk.input_bytes is UNSET:
        raise PlanError("$.chunk lacks 'input_bytes', which goes with 'recompute'")
    held = max(1.0, chunk.activation_bytes)
    if chunk.input_bytes > held:
        raise PlanError(
            f"$.chunk.input_bytes must be {held:g} at most, as $.chunk.activation_bytes, not {chunk.input_bytes:g}: a "
            "recomputed layer keeps no more than its forward holds"
        )
    return chunk.recompute.median / chunk.forward.median, chunk.input_bytes / held


_READERS: Mapping[int, Callable[[str], Profile]] = {1: from_text, VERSION: job_profile_json.from_text}
