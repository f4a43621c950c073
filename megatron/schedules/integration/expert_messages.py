"""Hides the messages of experts behind weight gradients.

Stock's ``alltoall`` dispatcher sends tokens to their experts and back, and waits for each message in F and in I. Here
such a message starts, this rank computes weight gradients that are due, and then waits. W does the rest. Every rank
decides by itself how many: the gradients computed here need no other rank.

Based on megatron-core 0.19.2, ``transformer/moe/token_dispatcher.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

Sizes = Sequence[int] | None
"""Rows to or from each rank; None if equal."""

RunAhead = Callable[[float], None]
"""Computes weight gradients that are due, about as many floating point operations as given."""

# Operations that take as long as a byte of a message: 400 TFLOP/s (H100, bf16) over 50 GB/s (a network of 400 Gbit/s).
FLOPS_PER_BYTE = 8000.0


class ExpertMessages:
    """Messages of experts in this process, and what runs behind them."""

    def __init__(self) -> None:
        # Plain, not thread-local: on a GPU a backward runs in a thread of its own.
        self._run_ahead: RunAhead | None = None

    @contextmanager
    def hidden(self, run_ahead: RunAhead) -> Iterator[None]:
        """Runs ``run_ahead`` behind each message inside the block."""
        self._run_ahead = run_ahead
        try:
            yield
        finally:
            self._run_ahead = None

    def send(self, stock: Callable[..., Tensor], group: ProcessGroup, rows: Tensor, *sizes: Any, **more: Any) -> Tensor:
        """Sends rows to and receives rows from each rank of ``group``, as stock's ``all_to_all`` does.

        Args:
            stock: stock's function, which runs outside :meth:`hidden` and where there is one rank.
            group: ranks that share the experts.
            rows: what this rank sends, (rows, ...).
            sizes, more: rows from each rank, rows to each rank, and a flag that says what stock waits for.
        """
        if self._run_ahead is None or group.size() == 1:
            return stock(group, rows, *sizes, **more)
        return self._sent(group, rows, *sizes, **more)

    def _sent(
        self,
        group: ProcessGroup,
        rows: Tensor,
        output_split_sizes: Sizes = None,
        input_split_sizes: Sizes = None,
        use_nccl_stream: bool = False,
    ) -> Tensor:
        assert self._run_ahead is not None
        received: Tensor = _AllToAll.apply(rows, group, output_split_sizes, input_split_sizes, self._run_ahead)
        return received


class _AllToAll(torch.autograd.Function):
    """One message in the forward, and the gradients' message in the backward."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, group: ProcessGroup, received: Sizes, sent: Sizes, run_ahead: RunAhead
    ) -> Tensor:
        ctx.back = group, sent, received, run_ahead
        return _exchanged(rows, group, received, sent, run_ahead)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _exchanged(gradient, *ctx.back), None, None, None, None


def _exchanged(rows: Tensor, group: ProcessGroup, received: Sizes, sent: Sizes, run_ahead: RunAhead) -> Tensor:
    rows = rows.contiguous()
    result = rows.new_empty((len(rows) if received is None else sum(received), *rows.shape[1:]))
    message = torch.distributed.all_to_all_single(result, rows, received, sent, group=group, async_op=True)
    run_ahead(FLOPS_PER_BYTE * max(rows.nbytes, result.nbytes))
    message.wait()
    return result
