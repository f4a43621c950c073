"""The product of a W under tensor parallelism: what waits for it from I on is this rank's, never what I gathered.

Under sequence parallelism a weight gradient is a product of rows of all tensor-parallel ranks. One of its two operands
comes from a gather: the input of a column parallel linear, the output's gradient of a row parallel one. That one would
take as much memory from I to W as all else that the layer holds; so only this rank's rows of it are kept, and W gathers
the rest, which the store has it start behind the W before.

A column parallel linear's input gradient is reduced over the tensor-parallel ranks. A whole backward hides that behind
the linear's own weight gradient; I hides it behind that of the row parallel linear which came just before it (that out
of attention behind that into it, and so in the MLP), whose product needs nothing from other ranks as long as what I
gathered is still there. So of that pair nothing is left to be exposed in either pass, and of the row parallel linear
nothing waits for W; I takes longer by the product, and W shorter. This is done where the product adds to ``main_grad``
itself, under gradient accumulation fusion; elsewhere its result, the size of the weight, would have to wait. Only the
product moves: parameters get their gradients, and their hooks fire, in W. That kernels of the product do not keep the
reduction from starting takes CUDA_DEVICE_MAX_CONNECTIONS=1 before Blackwell, as in a whole backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.schedules.runtime.weight_gradients import Closure, Key, WeightGradients


class Product:
    """Computes one W's gradients from an input and an output's gradient that may have to be gathered first.

    Args:
        compute: what gives the gradients, from input and output's gradient; called once.
        input: the rows of all ranks, or with ``over`` those of this one.
        grad_output: the rows of all ranks.
        over: the tensor-parallel ranks whose rows of ``input`` are gathered; None: none are.
        gathered_over: those whose rows of ``grad_output`` I has gathered; None: it has not.
        ahead: whether this may be computed in I already: of a row parallel linear, and adds to ``main_grad``.
        gather: begins to gather rows over ranks; returns what they will be, and what to wait for first, or None.

    Attributes:
        ahead: as given.
        gathers: whether an operand may have to be gathered in W.
    """

    def __init__(
        self,
        compute: Callable[[Any, Any], Any],
        input: Any,
        grad_output: Any,
        *,
        over: ProcessGroup | None = None,
        gathered_over: ProcessGroup | None = None,
        ahead: bool = False,
        gather: Callable[[Any, ProcessGroup], tuple[Any, Any]] | None = None,
    ) -> None:
        self._gather = gather or gathered
        self._compute: Callable[[Any, Any], Any] | None = compute
        self._operands = [input, grad_output]
        # Which operand is in parts, and over which ranks.
        self._in_parts = (0, over) if over is not None else None
        self._gathering: Any = None
        self._gathered_over, self._result = gathered_over, None
        self.ahead, self.gathers = ahead, over is not None or gathered_over is not None
        if not ahead:
            self._free()

    @property
    def held(self) -> list[Tensor]:
        """The memory of the operands as they wait."""
        return [tensor for operand in self._operands for tensor in memory_of(operand)]

    def gather(self) -> None:
        """Start gathering the operand that is in parts, if one is."""
        if self._in_parts is None:
            return
        which, group = self._in_parts
        self._operands[which], self._gathering = self._gather(self._operands[which], group)

    def settle(self, ahead: bool) -> list[Tensor]:
        """Compute ahead of W, or else let go of what I has gathered; returns what is held from then on."""
        if ahead:
            self._result = self._computed()
        else:
            self._free()
        return self.held

    def _free(self) -> None:
        if self._gathered_over is not None:
            self._operands[1] = part_of(self._operands[1], self._gathered_over)
            self._in_parts = (1, self._gathered_over)

    def result(self) -> Any:
        """What ``compute`` gives; to be asked once, for nothing is kept."""
        if self._compute is not None:
            return self._computed()
        result, self._result = self._result, None
        return result

    def _computed(self) -> Any:
        if self._gathering is not None:
            self._gathering.wait()
        assert self._compute is not None
        compute, operands = self._compute, self._operands
        self._compute, self._operands = None, []
        return compute(*operands)


def memory_of(operand: Any) -> list[Tensor]:
    """The plain tensors that ``operand`` consists of: itself, or those in a quantized or grouped one, or in a list."""
    if type(operand) is Tensor:
        return [operand]
    if isinstance(operand, (list, tuple)):
        return [tensor for part in operand for tensor in memory_of(part)]
    return [part for part in getattr(operand, "__dict__", {}).values() if type(part) is Tensor]


def gathered(part: Tensor, group: ProcessGroup) -> tuple[Tensor, Any]:
    """Begin to gather the rows of all ranks; returns them, and what to wait for before they are read."""
    part = part.contiguous()
    # A buffer of its own: it is filled while another W still reads what it gathered.
    whole = torch.empty((part.size(0) * group.size(), *part.shape[1:]), dtype=part.dtype, device=part.device)
    return whole, torch.distributed.all_gather_into_tensor(whole, part, group=group, async_op=True)


def part_of(whole: Tensor, group: ProcessGroup) -> Tensor:
    """This rank's rows of what was gathered over ``group``, in memory of their own."""
    return whole.chunk(group.size())[group.rank()].clone(memory_format=torch.contiguous_format)


def defer(store: WeightGradients, key: Key, product: Product, closure: Closure, parameters: Sequence[Tensor]) -> None:
    """Put ``closure``, which asks for the result of ``product``, off to the W of ``key``."""
    prefetch = product.gather if product.gathers else None
    settle = product.settle if product.ahead else None
    store.defer(key, closure, product.held, parameters=parameters, prefetch=prefetch, settle=settle)
