"""Leaves in place of the weights of Transformer Engine's linears, and who hears of backwards that reach them.

All forwards of one call of a schedule share the leaf of a weight, and one listener.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.schedules.integration.gpu_libraries import te_version
from megatron.schedules.integration.linears import te_operands
from megatron.schedules.integration.linears.local import fused_gradient
from megatron.schedules.runtime.parameter_leaves import Key, ParameterLeaves


class Listener:
    """Hears of each backward that reaches a leaf, after what linears' backwards have asked their calls.

    Args:
        module: a linear that uses the leaf.
        leaf: the leaf.
        weight: in whose place it is.
    """

    def __init__(self, module: Any, leaf: Any, weight: Tensor) -> None:
        self.leaf = leaf
        self._weight, self._fused, self._name = weight, module.fuse_wgrad_accumulation, type(module).__name__
        self._whole: bool | None = None
        self._asked: set[int] = set()

    def asked(self, call: int, *, defers: bool, done: bool) -> None:
        """The backward of a ``call``, by identity, has asked whether it ``defers`` the weight's gradient.

        ``done`` if it already has.
        """
        self._whole = not defers
        if defers and not done:
            self._asked.add(call)

    def deferred(self, call: int) -> None:
        """The backward of ``call`` has deferred it."""
        self._asked.discard(call)

    def arrived(self, *_: Any) -> None:
        """A backward has reached the leaf, with a gradient or with none."""
        if self._whole:
            if self._fused and self.leaf.grad is None:
                self.leaf.grad = fused_gradient(self._weight, self._weight.dtype)  # so that the weight's hooks run
            return
        self.leaf.grad = None
        if self._whole is None or self._asked:
            raise RuntimeError(
                f"Transformer Engine {te_version()} did not delay the weight gradient of a {self._name}: it works "
                "otherwise than the versions that splitting its backward was written for"
            )


class Heard(NamedTuple):
    """A leaf's listener, which hears as long as this lives, or a graph that reaches the leaf."""

    listener: Listener
    accumulator: Any


def heard_of(leaves: ParameterLeaves, key: Key, module: Any, weight: Any) -> Heard:
    """Returns the listener of a leaf for ``weight`` in the forward of ``key``: a shared one, unless it is quantized."""
    plain = type(weight) is torch.nn.Parameter
    leaf: Any = leaves.add(key, weight, None if plain else te_operands.leaf_of(weight))
    kept = leaves.kept if plain and leaves.kept is not None else {}
    if id(leaf) not in kept:
        if module.fuse_wgrad_accumulation:
            # Without ``grad_added_to_main_grad``, so that the backward makes no dummy gradient for it.
            leaf.main_grad = weight.main_grad
        listener, accumulator = Listener(module, leaf, weight), leaf.view_as(leaf).grad_fn.next_functions[0][0]
        accumulator.register_hook(listener.arrived)
        kept[id(leaf)] = Heard(listener, accumulator)
    found: Heard = kept[id(leaf)]
    return found
