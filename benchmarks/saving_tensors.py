"""Layers of the emulation that keep real tensors for their backward, as many bytes as planned."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.emulated_passes import Passes
from megatron.schedules.runtime.activation_meter import ActivationMeter
from megatron.schedules.schedule.kinds import Kind, Share


def _free(kept: Tensor) -> None: ...


class Part(nn.Module):
    """Some layers of a stage.

    Args:
        size: bytes that their forward keeps.
        left: told in the backward what the forward has kept.
    """

    def __init__(self, size: int, left: Callable[[Tensor], None] = _free) -> None:
        super().__init__()
        self.size, self.left = size, left
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor, mark: int) -> Tensor:
        """``x``; what is kept is full of ``mark``, at most 255, and is looked at in the backward."""
        return _SavesBytes.apply(x, self.weight, self, mark)


class _SavesBytes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, part: Part, mark: int) -> Tensor:
        ctx.part, ctx.mark = part, mark
        ctx.save_for_backward(torch.full((part.size,), mark, dtype=torch.uint8))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (kept,) = ctx.saved_tensors
        if kept.numel() != ctx.part.size or {int(kept[0]), int(kept[-1])} != {ctx.mark}:
            raise RuntimeError("the backward has not got what the forward kept")
        ctx.part.left(kept)
        return gradient.clone(), torch.zeros(()), None, None


class StockLayers(nn.Module):
    """A stage of stock's 1F1B that keeps the bytes of its costs until its backward, which recomputes the rest.

    Args:
        passes: their times and, by their costs, what they hold.
        stage: which.
        rank_bytes, layer_bytes: what a microbatch's activations take on a rank, and in one layer, where all are kept.
        meter: counts them.
    """

    def __init__(
        self, passes: Passes, stage: int, rank_bytes: int, layer_bytes: int, meter: ActivationMeter | None
    ) -> None:
        super().__init__()
        self._passes, self._stage, self._meter = passes, stage, meter
        kept = passes.costs.held[Share.FORWARD][stage]
        self._part = Part(round(kept * rank_bytes))
        self._again = round((passes.costs.activation[stage] - kept) * layer_bytes)

    def forward(self, x: Tensor) -> Tensor:
        begun = time.monotonic()
        with self._meter.recording() if self._meter else nullcontext():
            output: Tensor = _Beginning.apply(self._part(x, 1), self)
        self._passes.fill(Kind.F, self._stage, begun)
        return output

    def go_back(self) -> None:
        """Sleeps for the backward's time, recomputing one layer at a time."""
        begun = time.monotonic()
        again = torch.ones(self._again, dtype=torch.uint8)
        hold = self._meter.hold([again]) if self._meter else None
        self._passes.fill(Kind.B, self._stage, begun)
        if hold is not None:
            hold.release()


class _Beginning(torch.autograd.Function):
    """Begins the backward, while the forward's tensors are still there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layers: StockLayers) -> Tensor:
        ctx.layers = layers
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.layers.go_back()
        return gradient.clone(), None
