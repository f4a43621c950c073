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

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.schedules.runtime.weight_gradients import Key, WeightGradients


class Product(ABC):
    """Closure of one W: its gradients from an input and an output's gradient, one of which may have to be gathered.

    Args:
        input: rows of all ranks, or with ``over`` the rows of this rank.
        grad_output: rows of all ranks.
        over: tensor-parallel ranks whose rows of ``input`` W gathers, if any.
        gathered_over: ranks whose rows of ``grad_output`` I has gathered, if any.
        ahead: whether the product may be computed in I: for a row parallel linear that adds to ``main_grad``.

    Attributes:
        ahead: as above.
        gathers: whether W may have to gather an operand.
    """

    # Most have no more than operands.
    gathers = False
    _gathered_over: ProcessGroup | None = None
    # Index of the operand of which only this rank's part is stored, and the ranks to gather it from.
    _in_parts: tuple[int, ProcessGroup] | None = None
    _gathering: Any = None
    _result: Any = None

    def __init__(
        self,
        input: Any,
        grad_output: Any,
        *,
        over: ProcessGroup | None = None,
        gathered_over: ProcessGroup | None = None,
        ahead: bool = False,
    ) -> None:
        self._operands, self.ahead = [input, grad_output], ahead
        if over is not None:
            self._in_parts, self.gathers = (0, over), True
        if gathered_over is not None:
            self._gathered_over, self.gathers = gathered_over, True
            if not ahead:
                self._free()

    @abstractmethod
    def compute(self, input: Any, grad_output: Any) -> Any:
        """Returns the gradients, from rows of all ranks; called once."""

    @staticmethod
    def gathered(part: Any, group: ProcessGroup) -> tuple[Any, Any]:
        """Starts gathering the rows of all ranks; returns them and the communication to wait for, or None."""
        part = part.contiguous()
        # Not a shared buffer: it is filled while another W still reads its gathered rows.
        whole = torch.empty((part.size(0) * group.size(), *part.shape[1:]), dtype=part.dtype, device=part.device)
        return whole, torch.distributed.all_gather_into_tensor(whole, part, group=group, async_op=True)

    @property
    def held(self) -> list[Tensor]:
        """Tensors of the operands that are stored until W."""
        return memory_of(self._operands)

    def keep(self, kept: Callable[[Any], Any]) -> None:
        """Replaces each operand by what ``kept`` returns for it."""
        self._operands = [kept(operand) for operand in self._operands]

    def gather(self) -> None:
        """Starts gathering the operand of which this rank has only a part, if there is one."""
        if self._in_parts is None:
            return
        which, group = self._in_parts
        self._operands[which], self._gathering = self.gathered(self._operands[which], group)

    def settle(self, ahead: bool) -> list[Tensor]:
        """Computes the product ahead of W, or frees the rows that I gathered; returns the tensors still stored."""
        if ahead:
            self._result = self._computed()
        else:
            self._free()
        return self.held

    def _free(self) -> None:
        if self._gathered_over is not None:
            self._operands[1] = part_of(self._operands[1], self._gathered_over)
            self._in_parts = (1, self._gathered_over)

    def __call__(self) -> Any:
        """Returns the gradients once, without keeping them."""
        if self._operands:
            return self._computed()
        result, self._result = self._result, None
        return result

    def _computed(self) -> Any:
        if self._gathering is not None:
            self._gathering.wait()
        operands, self._operands = self._operands, []
        return self.compute(*operands)


def memory_of(operand: Any) -> list[Tensor]:
    """Plain tensors in ``operand``: itself, or the tensors of a quantized or grouped operand, or of a list."""
    if type(operand) is Tensor:
        return [operand]
    if isinstance(operand, (list, tuple)):
        if set(map(type, operand)) == {Tensor}:
            return list(operand)
        return [tensor for part in operand for tensor in memory_of(part)]
    return [part for part in getattr(operand, "__dict__", {}).values() if type(part) is Tensor]


def part_of(whole: Tensor, group: ProcessGroup) -> Tensor:
    """Returns a copy of this rank's rows of ``whole``, which was gathered over ``group``."""
    return whole.chunk(group.size())[group.rank()].clone(memory_format=torch.contiguous_format)


def defer(store: WeightGradients, key: Key, product: Product, parameters: Sequence[Tensor]) -> None:
    """Defers ``product`` to the W of ``key``."""
    if store.volatile:
        product.keep(store.kept)
    prefetch = product.gather if product.gathers else None
    settle = product.settle if product.ahead else None
    store.defer(key, product, product.held, parameters=parameters, prefetch=prefetch, settle=settle)
