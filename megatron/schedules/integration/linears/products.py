"""Product of a W under tensor parallelism. Between I and W only this rank's rows of its operands are stored.

Under sequence parallelism one of the two operands is gathered: the input of a column parallel linear, or the output's
gradient of a row parallel one. The gathered operand would use as much memory from I to W as everything else that the
layer stores. So only this rank's rows are stored, and W gathers the rest. The store starts this communication during
the previous W.

The input gradient of a column parallel linear is reduced over the tensor-parallel ranks. An unsplit backward overlaps
that with the linear's own weight gradient. I overlaps it with the weight gradient of the previous row parallel linear
in the backward, which needs nothing from other ranks while the rows that I gathered are still allocated. I is longer by
this product, and W shorter. This requires gradient accumulation fusion, where the product adds to ``main_grad``;
otherwise its result would have to be stored. Parameters get their gradients, and their hooks fire, in W. Before
Blackwell the reduction starts first only with CUDA_DEVICE_MAX_CONNECTIONS=1, as in an unsplit backward.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.schedules.runtime.deferred_gradient import DeferredGradient
from megatron.schedules.runtime.weight_gradients import Key, WeightGradients

PLAIN = {Tensor}
"""Kinds of operands that are not quantized."""


class Spread(NamedTuple):
    """How a product's operands are spread over tensor-parallel ranks.

    Args:
        over: ranks whose rows of the input W gathers, if any.
        gathered_over: ranks whose rows of the output's gradient I has gathered, if any.
        ahead: whether the product may be computed in I: for a row parallel linear that adds to ``main_grad``.
    """

    over: ProcessGroup | None
    gathered_over: ProcessGroup | None
    ahead: bool


class Product(DeferredGradient):
    """Gradients from an input and an output's gradient, one of which may have to be gathered.

    Args:
        store: that it is added to.
        key, parameters: see :class:`.DeferredGradient`.
        operands: the input and the output's gradient: rows of all ranks, of an input to gather those of this rank.
        spread: of the operands; None if no rank needs the rows of another.

    Attributes:
        ahead: see :class:`Spread`.
    """

    # Most have no more than operands.
    ahead = False
    _gathered_over: ProcessGroup | None = None
    # Index of the operand of which only this rank's part is stored, and the ranks to gather it from.
    _in_parts: tuple[int, ProcessGroup] | None = None
    _gathering: Any = None
    _result: Any = None

    def __init__(
        self,
        store: WeightGradients,
        key: Key,
        parameters: tuple[Tensor, ...],
        operands: Sequence[Any],
        spread: Spread | None = None,
    ) -> None:
        self._operands = operands
        if spread is not None:
            over, self._gathered_over, self.ahead = spread
            self.settles, self.gathers = self.ahead, over is not None or self._gathered_over is not None
            if over is not None:
                self._in_parts = (0, over)
            if not self.ahead:
                self._free()
        if store.volatile:
            self._operands = tuple(map(store.kept, self._operands))
        super().__init__(key, parameters, memory_of(self._operands))

    @abstractmethod
    def multiply(self, input: Any, grad_output: Any) -> Any:
        """Returns the product, from rows of all ranks; called once, in W or ahead of it."""

    def completed(self, product: Any) -> Sequence[Tensor | None]:
        """Returns, in W, the gradients from what :meth:`multiply` returned."""
        gradients: Sequence[Tensor | None] = product
        return gradients

    @staticmethod
    def gathered(part: Any, group: ProcessGroup) -> tuple[Any, Any]:
        """Starts gathering the rows of all ranks; returns them and the communication to wait for, or None."""
        part = part.contiguous()
        # Not a shared buffer: it is filled while another W still reads its gathered rows.
        whole = torch.empty((part.size(0) * group.size(), *part.shape[1:]), dtype=part.dtype, device=part.device)
        return whole, torch.distributed.all_gather_into_tensor(whole, part, group=group, async_op=True)

    def gather(self) -> None:
        """Starts gathering the operand of which this rank has only a part, if there is one."""
        if self._in_parts is None:
            return
        which, group = self._in_parts
        whole, self._gathering = self.gathered(self._operands[which], group)
        self._operands = (*self._operands[:which], whole, *self._operands[which + 1 :])

    def settled(self, ahead: bool) -> Sequence[Tensor]:
        """Computes the product ahead of W, or frees the rows that I gathered; returns the tensors still stored."""
        if ahead:
            operands, self._operands = self._operands, ()
            self._result = self.multiply(*operands)
        else:
            self._free()
        return memory_of(self._operands)

    def gradients(self) -> Sequence[Tensor | None]:
        """See :class:`.DeferredGradient`."""
        operands, self._operands = self._operands, ()
        if not operands:
            result, self._result = self._result, None
            return self.completed(result)
        if self._gathering is not None:
            self._gathering.wait()
        return self.completed(self.multiply(*operands))

    def _free(self) -> None:
        if self._gathered_over is not None:
            input, grad_output = self._operands
            self._operands = input, part_of(grad_output, self._gathered_over)
            self._in_parts = (1, self._gathered_over)


def memory_of(operand: Any) -> Sequence[Tensor]:
    """Plain tensors in ``operand``: itself, or the tensors of a quantized or grouped operand, or of a sequence."""
    kind = type(operand)
    if kind is list or kind is tuple:
        if set(map(type, operand)) == PLAIN:
            return operand
        return [tensor for part in operand for tensor in memory_of(part)]
    if kind is Tensor:
        return (operand,)
    return [part for part in getattr(operand, "__dict__", {}).values() if type(part) is Tensor]


def part_of(whole: Tensor, group: ProcessGroup) -> Tensor:
    """Returns a copy of this rank's rows of ``whole``, which was gathered over ``group``."""
    return whole.chunk(group.size())[group.rank()].clone(memory_format=torch.contiguous_format)
