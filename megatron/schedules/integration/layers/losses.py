"""Sends the losses to the rank where stock Megatron reports them.

Stock's training loop reads the losses on the last pipeline rank. In a V the output layer is on the first.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# For every microbatch its losses' names, shapes and types.
_Form = list[dict[str, tuple[tuple[int, ...], torch.dtype]]]


class LossRelay:
    """Sends the loss store and the token count from one rank of a pipeline to all its ranks.

    Names and shapes of the losses are sent as an object when they change; otherwise a call is two small broadcasts.

    Args:
        group: the pipeline's process group.
        source: the rank in it that computes the losses.
    """

    def __init__(self, group: dist.ProcessGroup, source: int) -> None:
        self._group, self._source = group, source
        self._is_source = dist.get_rank(group) == source
        self._form: _Form | None = None

    def __call__(self, losses: list[dict[str, Tensor]], tokens: Tensor) -> tuple[list[dict[str, Tensor]], Tensor]:
        """Returns the source's losses and tokens, on every rank."""
        form = [{key: (tuple(value.shape), value.dtype) for key, value in each.items()} for each in losses]
        changed = torch.tensor([self._is_source and form != self._form], dtype=torch.int, device=tokens.device)
        dist.broadcast(changed, group_src=self._source, group=self._group)
        if changed.item():
            message: list[Any] = [form]
            dist.broadcast_object_list(message, group_src=self._source, group=self._group)
            self._form = message[0]
        assert self._form is not None
        if self._is_source:
            parts = [value.detach().reshape(-1).double() for each in losses for value in each.values()]
            packed = torch.cat([*parts, tokens.reshape(1).double()])
        else:
            size = sum(torch.Size(shape).numel() for each in self._form for shape, _ in each.values())
            packed = torch.empty(size + 1, dtype=torch.double, device=tokens.device)
        dist.broadcast(packed, group_src=self._source, group=self._group)
        return self._unpacked(packed), packed[-1].to(tokens.dtype)

    def _unpacked(self, packed: Tensor) -> list[dict[str, Tensor]]:
        assert self._form is not None
        at, losses = 0, []
        for each in self._form:
            found = {}
            for key, (shape, dtype) in each.items():
                size = torch.Size(shape).numel()
                found[key] = packed[at : at + size].reshape(shape).to(dtype)
                at += size
            losses.append(found)
        return losses
