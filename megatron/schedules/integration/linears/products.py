"""The product of a W under tensor parallelism: what waits for it from I on is this rank's, never what I gathered.

Under sequence parallelism a weight gradient is a product of rows of all tensor-parallel ranks. One of its two operands
comes from a gather: the input of a column parallel linear, the output's gradient of a row parallel one. That one would
take as much memory from I to W as all else that the layer holds; so only this rank's rows of it are kept, and W gathers
the rest, which the store has it start behind the W before.
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
    """

    def __init__(
        self,
        compute: Callable[[Any, Any], Any],
        input: Any,
        grad_output: Any,
        *,
        over: ProcessGroup | None = None,
        gathered_over: ProcessGroup | None = None,
    ) -> None:
        self._compute = compute
        self._operands = [input, grad_output]
        # Which operand is in parts, and over which ranks.
        self._in_parts = (0, over) if over is not None else None
        self._gathering: Any = None
        if gathered_over is not None:
            self._operands[1] = part_of(grad_output, gathered_over)
            self._in_parts = (1, gathered_over)

    @property
    def held(self) -> list[Tensor]:
        """The operands as they wait, as far as they are plain tensors."""
        each = [x if isinstance(x, (list, tuple)) else [x] for x in self._operands]
        return [tensor for group in each for tensor in group if type(tensor) is Tensor]

    def gather(self) -> None:
        """Start gathering the operand that is in parts, if one is."""
        if self._in_parts is None:
            return
        which, group = self._in_parts
        part = self._operands[which].contiguous()
        # A buffer of its own: it is filled while another W still reads what it gathered.
        whole = torch.empty((part.size(0) * group.size(), *part.shape[1:]), dtype=part.dtype, device=part.device)
        self._gathering = torch.distributed.all_gather_into_tensor(whole, part, group=group, async_op=True)
        self._operands[which] = whole

    def result(self) -> Any:
        """What ``compute`` gives; to be asked once, for nothing is kept."""
        if self._gathering is not None:
            self._gathering.wait()
        compute, operands = self._compute, self._operands
        del self._compute, self._operands
        return compute(*operands)


def part_of(whole: Tensor, group: ProcessGroup) -> Tensor:
    """This rank's rows of what was gathered over ``group``, in memory of their own."""
    return whole.chunk(group.size())[group.rank()].clone(memory_format=torch.contiguous_format)


def defer(store: WeightGradients, key: Key, product: Product, closure: Closure, parameters: Sequence[Tensor]) -> None:
    """Put ``closure``, which asks for the result of ``product``, off to the W of ``key``."""
    store.defer(key, closure, product.held, parameters=parameters, prefetch=product.gather)
