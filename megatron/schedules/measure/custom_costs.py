"""Cost files written by hand, see docs/costs.md."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from msgspec import Meta

from megatron.schedules.schedule.costs import Costs
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.json_files import Amount, Count, Form, Portion, Positive, decode

VERSION = 3
_Slices = Annotated[tuple[Amount, ...], Meta(min_length=1)]


class CustomCosts(Form, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file; every field but the version may be left out.

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
        return replace(costs, one_way=self.one_way, **{name: at for name, at in fields.items() if at is not None})


def from_text(text: str) -> CustomCosts:
    """Reads the file; raises :class:`.PlanError`, which begins with the field."""
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
