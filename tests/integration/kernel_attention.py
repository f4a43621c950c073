"""A core attention that is one kernel, torch's own for CPUs, which keeps no scores: as those of a GPU."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models import backends
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.integration.plain_attention import PlainAttention


def put_in_place() -> None:
    """Let Megatron's local layers use it, in this process."""
    backends.DotProductAttention = KernelAttention


class KernelAttention(PlainAttention):
    """Causal, with as many heads of keys and values as of queries. Arguments as Transformer Engine's."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The context, (s, b, heads * d), of (s, b, heads, d) each."""
        # Transformer Engine's copies what is not contiguous before it chooses a kernel.
        views = [each.contiguous().permute(1, 2, 0, 3) for each in (query, key, value)]
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            context = torch.nn.functional.scaled_dot_product_attention(*views, is_causal=True, scale=self._scale)
        return context.permute(2, 0, 1, 3).flatten(-2)
