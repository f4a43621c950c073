"""Stages of plain torch layers, and what the same model gives without any pipeline: the runtime's oracle."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack, nullcontext

import torch
from torch import Tensor, nn

from megatron.schedules.runtime.recompute import Recomputes, recompute_layer
from megatron.schedules.runtime.weight_gradients import WeightGradients
from megatron.schedules.schedule.kinds import Kind
from megatron.schedules.schedule.schedule import Schedule

SHAPE = (3, 8)
"""Of every message: rows, features."""


class SplitLinear(nn.Module):
    """A linear layer whose weight gradient is deferred where the store says so in its forward."""

    def __init__(self, features: int, store: WeightGradients) -> None:
        super().__init__()
        whole = nn.Linear(features, features)
        self.weight, self.bias = whole.weight, whole.bias
        self.store = store

    def forward(self, x: Tensor) -> Tensor:
        key = self.store.current
        if key is None:
            return nn.functional.linear(x, self.weight, self.bias)
        parameters = self.weight, self.bias
        leaves = (self.store.leaves.add(key, parameter).leaf for parameter in parameters)
        return _Deferring.apply(x, *leaves, parameters, self.store, key)


class _Deferring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, parameters, store, key):
        ctx.save_for_backward(x, weight)
        ctx.parameters, ctx.store, ctx.key = parameters, store, key
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        if not ctx.store.defers(ctx.key):
            return grad.mm(weight), grad.t().mm(x), grad.sum(0), None, None, None
        ctx.store.defer(ctx.key, lambda: (grad.t().mm(x), grad.sum(0)), (grad, x), parameters=ctx.parameters)
        return grad.mm(weight), None, None, None, None, None


def make_stage(stage: int, store: WeightGradients) -> nn.Module:
    """Stage ``stage`` of the model, with the weights that belong to it."""
    torch.manual_seed(stage)
    features = SHAPE[1]
    return nn.Sequential(SplitLinear(features, store), nn.GELU(), SplitLinear(features, store), nn.GELU())


def data(microbatch: int, *, varied: bool = False) -> Tensor:
    """The model's input for ``microbatch``, ``varied`` with its own number of rows."""
    generator = torch.Generator().manual_seed(1000 + microbatch)
    rows = int(torch.randint(1, 50, (), generator=generator)) if varied else SHAPE[0]
    return torch.randn((rows, SHAPE[1]), generator=generator)


def loss_of(output: Tensor) -> Tensor:
    """A loss that every element of the output moves."""
    return output.square().sum()


class PlainStages:
    """The stages of one rank (see :class:`megatron.schedules.runtime.stage_interface.Stages`)."""

    def __init__(self, stages: Iterable[int], last_stage: int, *, varied: bool = False) -> None:
        self._varied = varied
        self.store = WeightGradients()
        self.modules = {stage: make_stage(stage, self.store) for stage in stages}
        self.recomputes = Recomputes(lambda: nullcontext)
        for module in self.modules.values():
            for layer in module:
                recompute_layer(layer, self.recomputes)
        self.losses: dict[int, Tensor] = {}
        self.seen: dict[tuple[int, int], Tensor] = {}
        self._last_stage = last_stage
        self._open: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._split: set[tuple[int, int]] = set()

    def forward(
        self, stage: int, microbatch: int, activation: Tensor | None, *, split: bool, recompute: bool
    ) -> Tensor | None:
        assert (activation is None) == (stage == 0)
        x = data(microbatch, varied=self._varied) if activation is None else activation.requires_grad_()
        with ExitStack() as stack:
            if split:
                stack.enter_context(self.store.split(stage, microbatch))
                self._split.add((stage, microbatch))
            if recompute:
                stack.enter_context(self.recomputes.forward(stage, microbatch))
            output = self.modules[stage](x)
            if stage == self._last_stage:
                output = loss_of(output)
                self.losses[microbatch] = output.detach()
        self._open[stage, microbatch] = x, output
        return None if stage == self._last_stage else output

    def recompute_forward(self, stage: int, microbatch: int) -> None:
        with self.store.split(stage, microbatch) if (stage, microbatch) in self._split else nullcontext():
            self.recomputes.run(stage, microbatch)

    def backward(self, stage: int, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        assert (gradient is None) == (stage == self._last_stage)
        x, output = self._open.pop((stage, microbatch))
        torch.autograd.backward(output, gradient)
        return x.grad if stage else None

    def backward_input(self, stage: int, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        with self.store.input_gradient(stage, microbatch):
            return self.backward(stage, microbatch, gradient)

    def backward_weight(self, stage: int, microbatch: int) -> None:
        self.store.run(stage, microbatch)

    def reduce_gradients(self, stage: int) -> None: ...

    def gradients(self) -> dict[int, list[Tensor | None]]:
        """By stage, the gradient of each of its parameters."""
        self.store.assert_empty()
        self.recomputes.assert_empty()
        return {stage: [p.grad for p in module.parameters()] for stage, module in self.modules.items()}


def without_pipeline(schedule: Schedule, *, varied: bool = False) -> tuple[dict[int, list[Tensor]], dict[int, Tensor]]:
    """Gradients by stage and losses by microbatch of the whole model on one process, by plain autograd.

    Each stage's gradients are summed over the microbatches in the order of its weight gradients in
    ``schedule``: sums of floating-point numbers depend on it.
    """
    store = WeightGradients()
    stages = [make_stage(stage, store) for stage in range(schedule.placement.stages)]
    parameters = [list(stage.parameters()) for stage in stages]
    single: dict[tuple[int, int], list[Tensor]] = {}
    losses = {}
    for m in range(schedule.microbatches):
        loss = loss_of(nn.Sequential(*stages)(data(m, varied=varied)))
        losses[m] = loss.detach()
        found = iter(torch.autograd.grad(loss, [p for group in parameters for p in group]))
        for stage, group in enumerate(parameters):
            single[stage, m] = [next(found) for _ in group]
    sums: dict[int, list[Tensor]] = {}
    for _, work in schedule.passes():
        if work.kind in (Kind.W, Kind.B):
            gradients = single[work.stage, work.microbatch]
            earlier = sums.get(work.stage)
            sums[work.stage] = (
                [g.clone() for g in gradients]
                if earlier is None
                else [a + g for a, g in zip(earlier, gradients, strict=True)]
            )
    return sums, losses
