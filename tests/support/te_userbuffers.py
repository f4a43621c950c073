"""Userbuffers of Transformer Engine's compiled half, over gloo: tensor-parallel messages behind matrix products.

Based on ``pytorch/csrc/extensions/comm_gemm_overlap.cpp``. Nothing overlaps here, but memory is used as on a GPU: all
layers share a buffer for each kind of product, tensors are views of it, and the next use overwrites them. So a read
that comes too late gives wrong numbers here too. Filling a rank's part makes the others unusable until they are
gathered.

There are no buffers whose reduce-scatter is in FP8. Quantized buffers need Transformer Engine 2.7 or newer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.te_types import MissingError

# Bytes of unusable numbers: not a number in fp32, in bf16, and in both kinds of FP8.
_UNUSABLE = 0xFF


class CommOverlapHelper:
    """Process groups of the ranks that share buffers."""

    def __init__(self, world: Any = None, domain: Any = None) -> None:
        self.group = world if domain is None else domain


class CommOverlap:
    """One buffer (tokens, width), of which each of the tensor-parallel ranks owns the rows of its part."""

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, helper: CommOverlapHelper, tp_size: int, *_: Any, **__: Any
    ) -> None:
        self._group = helper.group
        if self._group.size() != tp_size:
            raise MissingError("Userbuffers of ranks that are not one tensor-parallel group")
        self._whole = torch.zeros(tuple(shape), dtype=dtype)
        self._parts = self._whole.chunk(tp_size)

    @property
    def _own(self) -> Tensor:
        return self._parts[self._group.rank()]

    def is_fp8_ubuf(self) -> bool:
        """Returns whether the buffer holds quantized numbers."""
        return self._whole.element_size() == 1

    def with_cublasmp(self) -> bool:
        """Returns whether another library does the communication."""
        return False

    def set_buffer_params(self, quantizer: Any) -> None:
        """Sets the scale of a quantized buffer (before 2.5)."""
        _refuse_quantizer(quantizer)

    def copy_into_buffer(self, tensor: Tensor, *before_2_5: Any, local_chunk: bool = False) -> None:
        """Fills the buffer, or with ``local_chunk`` this rank's part of it; the other parts become unusable."""
        for each in before_2_5:
            _refuse_quantizer(each)
        into = self._own if local_chunk else self._whole
        assert tensor.numel() == into.numel() and tensor.element_size() == into.element_size()
        kept = tensor.detach().clone()
        self._whole.view(torch.uint8).fill_(_UNUSABLE)
        into.view(kept.dtype).copy_(kept.view_as(into))

    def get_buffer(self, *before_2_5: Any, local_chunk: bool = False, shape: Sequence[int] | None = None) -> Tensor:
        """Returns the buffer, or with ``local_chunk`` this rank's part of it, as a view."""
        for each in before_2_5:
            _refuse_quantizer(each)
        found = self._own if local_chunk else self._whole
        assert shape is None or math.prod(shape) == found.numel()
        # Tensors of a GPU's buffer share memory and nothing else.
        return found.data if shape is None else found.data.view(tuple(shape))

    def get_communication_stream(self) -> tuple[None, None]:
        """Returns the streams of sends and of receives."""
        return None, None

    def gather(self) -> None:
        """Fills the parts of all ranks."""
        dist.all_gather(list(self._parts), self._own.clone(), group=self._group)

    def reduced(self) -> Tensor:
        """Returns the sum of all ranks' buffers, of this rank's part."""
        if self.is_fp8_ubuf():
            raise MissingError("a reduce-scatter of Userbuffers in FP8")
        found = [torch.empty_like(self._whole) for _ in self._parts]
        dist.all_gather(found, self._whole, group=self._group)
        parts = [each.chunk(len(found))[self._group.rank()].float() for each in found]
        return torch.stack(parts).sum(0).to(self._whole.dtype)

    def reduce(self) -> None:
        """Leaves the sum of all ranks' buffers in this rank's part."""
        self._own.copy_(self.reduced())


class CommOverlapP2P(CommOverlap):
    """The same, with messages in a ring."""


def overlapped(
    product: Callable[[], list[Any]], buffer: CommOverlap, kind: Any, bulk: bool, extra_output: Tensor | None
) -> list[Any]:
    """Runs a matrix product with communication in ``buffer``, of a ``kind`` of ``CommOverlapType``.

    With ``bulk`` that of other tensors than the product's. If the product is reduced, ``extra_output`` gets it.
    """
    gathers = kind.name == "AG"
    if bulk:
        found = product()
        buffer.gather() if gathers else buffer.reduce()
    elif gathers:
        buffer.gather()
        found = product()
    else:
        found = product()
        buffer.copy_into_buffer(found[0])
        found[0] = buffer.get_buffer()
        assert extra_output is not None
        extra_output.copy_(buffer.reduced().view_as(extra_output))
    return found


def _gather_behind_another(buffer: CommOverlap, send_stream: None, receive_stream: None) -> None:
    buffer.gather()


def _refuse_quantizer(given: Any) -> None:
    if given is not None:
        raise MissingError("quantized Userbuffers of Transformer Engine before 2.7")


CLASSES: dict[str, Any] = {each.__name__: each for each in (CommOverlapHelper, CommOverlap, CommOverlapP2P)}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "bulk_overlap_ag_with_external_gemm": _gather_behind_another,
    "device_supports_multicast": lambda device_id=-1: True,
    "ubuf_built_with_mpi": lambda: False,
}
