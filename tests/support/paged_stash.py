"""Megatron's kernels of a paged stash in plain torch: they copy rows to pages and back. No host waits.

Based on megatron-core 0.19.2, ``transformer/moe/ops/paged_stash.py``. There is no stand-in for pages in host memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _Kernel:
    """A Triton kernel, which is called as ``kernel[grid](...)``."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = torch.no_grad()(function)

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self._function


def _put(into: Tensor, at: Tensor, which: Tensor, values: Tensor) -> None:
    """Writes ``values[i]`` to ``into[at[i]]`` for each i in ``which``."""
    longer = torch.cat([into, into[:1]])
    longer[torch.where(which, at, len(into))] = values
    into.copy_(longer[:-1])


def copy(
    src: Tensor, pages: Tensor, host: Tensor, tokens: Tensor, free: Tensor, free_host: Tensor, head: Tensor,
    tail: Tensor, capacity: Tensor, record: Tensor, overflow: Tensor, host_spill: Tensor, spilled: Tensor,
    new_head: Tensor, **sizes: int,
) -> None:  # fmt: skip
    """Replaces ``paged_stash_copy_kernel``."""
    assert not sizes["HAS_HOST_BUFFER"]
    rows, page_size = src.reshape(-1, sizes["HIDDEN_SIZE"]), sizes["PAGE_SIZE"]
    needed, before = (tokens + page_size - 1) // page_size, overflow == 1
    fits = tail[:1] - head[:1] >= needed
    done = ~before & fits
    overflow.copy_(torch.where(before | fits, overflow, 1))
    spilled.copy_(torch.where(done, 0, torch.where(before, spilled, 1)))
    slots, at = torch.arange(len(record)), torch.arange(len(rows))
    page = free[(head[0] + slots) % capacity[0]]
    record.copy_(torch.where((slots < needed) & done, page, record))
    _put(pages, page[at // page_size] * page_size + at % page_size, (at < tokens) & done, rows)
    new_head.copy_(torch.cat([torch.where(done, head[:1] + needed, head[:1]), head[1:]]))


def pop(
    pages: Tensor, host: Tensor, dst: Tensor, tokens: Tensor, record: Tensor, spilled: Tensor, overflow: Tensor,
    free: Tensor, free_host: Tensor, tail: Tensor, capacity: Tensor, new_tail: Tensor, **sizes: int,
) -> None:  # fmt: skip
    """Replaces ``paged_stash_pop_kernel``."""
    rows, page_size = dst.view(-1, sizes["HIDDEN_SIZE"]), sizes["PAGE_SIZE"]
    needed, done = (tokens + page_size - 1) // page_size, overflow != 1
    slots, at = torch.arange(len(record)), torch.arange(len(rows))
    which = (at < tokens) & done
    from_row = torch.where(which, record[at // page_size] * page_size + at % page_size, 0)
    rows.copy_(torch.where(which[:, None], pages[from_row], rows))
    _put(free, (tail[0] + slots) % capacity[0], (slots < needed) & done, record)
    new_tail.copy_(torch.cat([torch.where(done, tail[:1] + needed, tail[:1]), tail[1:]]))


def install() -> None:
    """Puts them in the place of Megatron's kernels."""
    from megatron.core.transformer.moe import paged_stash

    paged_stash.paged_stash_copy_kernel, paged_stash.paged_stash_pop_kernel = _Kernel(copy), _Kernel(pop)
