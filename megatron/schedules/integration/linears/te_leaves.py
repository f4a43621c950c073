"""Leaves in place of the weights of a Transformer Engine linear, who hears of backwards that reach them, and its use.

All forwards of one call of a schedule share them. A linear of experts has hundreds: where possible, all are handled at
once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.schedules.integration.gpu_libraries import te_version
from megatron.schedules.integration.linears import te_operands
from megatron.schedules.integration.linears.fused_accumulation import fused_gradient
from megatron.schedules.integration.linears.local import FSDP
from megatron.schedules.runtime.parameter_leaves import Key, ParameterLeaves, StandIn, accumulator_of
from megatron.schedules.runtime.weight_gradients import WeightGradients

MARKS = {
    "overwrite_main_grad": "weight whose gradient is overwritten",
    "__fsdp_param__": FSDP,
    "is_distributed_weight": "distributed weight",
}
"""Attributes of weights with gradients of another kind, and what those are."""


class Listener:
    """Hears of backwards that reach leaves of a linear, after what the linear's backward has asked its call.

    Each takes the host 6 microseconds. So leaves that are made after the first I are heard only if it has left
    gradients in them.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._whole: bool | None = None
        self._awaited = 0
        self._delayed = self._left_gradients = False

    @property
    def must_hear(self) -> bool:
        """Whether new leaves are to be heard."""
        return self._left_gradients or not self._delayed

    def asked(self, call: int, *, defers: bool, done: bool) -> None:
        """The backward of a ``call``, by identity, has asked whether it ``defers`` the weights' gradients.

        ``done`` if it already has.
        """
        self._whole = not defers
        self._awaited = call if defers and not done else 0

    def deferred(self, call: int) -> None:
        """The backward of ``call`` has deferred them."""
        if self._awaited == call:
            self._awaited = 0

    def arrived(self, leaf: Tensor, *_: Any) -> None:
        """A backward has reached ``leaf``, with a gradient or with none."""
        if self._whole:
            return
        self._left_gradients |= leaf.grad is not None
        leaf.grad = None
        if self._whole is None or self._awaited:
            raise RuntimeError(
                f"Transformer Engine {te_version()} did not delay the weight gradient of a {self._name}: it works "
                "otherwise than the versions that splitting its backward was written for"
            )
        self._delayed = True


class Leaves(NamedTuple):
    """Leaves in place of all weights of a linear.

    Args:
        places: name, weight and address of each; none if one is quantized: its numbers may move between forwards.
        stand_ins: the weights with their leaves.
        leaves: by name.
        listener: of the linear, which hears of them as long as this lives, or a graph that reaches them; None if it
            need not.
        accumulators: nodes of the leaves that are heard.
    """

    places: Sequence[tuple[str, Tensor, int]]
    stand_ins: tuple[StandIn, ...]
    leaves: dict[str, Tensor]
    listener: Listener | None
    accumulators: Sequence[Any]

    def are_of(self, module: Any) -> bool:
        """Returns whether the weights of ``module`` are these, trained, in the same memory and without a mark.

        Only where there are :attr:`places`.
        """
        own = module._parameters
        for name, weight, address in self.places:
            if own[name] is not weight or not weight.requires_grad or weight.data_ptr() != address:
                return False
            if not weight.__dict__.keys().isdisjoint(MARKS):
                return False
        return True


def new_leaves(
    leaves: ParameterLeaves, key: Key, module: Any, weights: dict[str, Tensor], listener: Listener
) -> Leaves:
    """Returns leaves of ``module``, whose ``listener`` hears of them if it must, in the forward of ``key``."""
    by_name, stand_ins, accumulators = dict[str, Tensor](), list[StandIn](), list[Any]()
    for name, weight in weights.items():
        leaf, elsewhere = te_operands.leaf_of(weight), None
        if module.fuse_wgrad_accumulation:
            # Without ``grad_added_to_main_grad``, so that the backward makes no dummy gradient for it.
            leaf.main_grad = weight.main_grad  # type: ignore[attr-defined]
            elsewhere = partial(fused_gradient, weight, weight.dtype)
        by_name[name] = leaf
        stand_ins.append(leaves.add(key, weight, leaf, elsewhere=elsewhere))
        if listener.must_hear:
            accumulators.append(accumulator_of(leaf))
            accumulators[-1].register_hook(partial(listener.arrived, leaf))
    plain = all(type(weight) is torch.nn.Parameter for weight in weights.values())
    places = [(name, weight, weight.data_ptr()) for name, weight in weights.items()] if plain else []
    heard = listener if accumulators else None
    return Leaves(places, tuple(stand_ins), by_name, heard, accumulators)


class Use(NamedTuple):
    """How the forwards of one call of the schedule use a linear, for their I and W.

    Args:
        module: the linear.
        store: of the schedule.
        leaves: of the weights.
        fused: whether products add to ``main_grad``.
        column_parallel, row_parallel: whether the linear is, on several ranks.
        input_over: ranks over which the backward gathers the rows of the input, if it does.
        gradient_over: those of the output's gradient.
        gradient_in_buffer: whether the output's gradient is gathered in a userbuffer.
    """

    module: Any
    store: WeightGradients
    leaves: Leaves
    fused: bool
    column_parallel: bool
    row_parallel: bool
    input_over: Any
    gradient_over: Any
    gradient_in_buffer: bool


def use_of(module: Any, store: WeightGradients, leaves: Leaves) -> Use:
    """Returns how ``module`` is used with these leaves."""
    parallel = module.parallel_mode if module.tp_size > 1 else None
    column, row = parallel == "column", parallel == "row"
    over = module.tp_group if module.sequence_parallel else None
    in_buffer = bool(getattr(module, "ub_overlap_ag_dgrad", False))
    fused: bool = module.fuse_wgrad_accumulation
    return Use(module, store, leaves, fused, column, row, over if column else None, over if row else None, in_buffer)
