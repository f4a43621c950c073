"""S and T: forward and backward of a rank's part of the output layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import layers as stock
from torch import Tensor

from megatron.schedules.integration.linears.fused_accumulation import add_to_main_grad, fused_gradient
from megatron.schedules.integration.vocabulary import arithmetic
from megatron.schedules.integration.vocabulary.arithmetic import Scales, Statistics
from megatron.schedules.integration.vocabulary.parts import OutputPart
from megatron.schedules.runtime.activation_meter import ActivationMeter, Hold
from megatron.schedules.runtime.weight_gradients import WeightGradients


class Made(NamedTuple):
    """The results of S for a microbatch; rows are tokens, sequence first.

    Args:
        statistics: of the vocabulary entries of this rank and its tensor-parallel ranks.
        addends: the two parts of the hidden states' gradient, of this rank's tokens; None where no backward follows.
        hold: counts the addends until it is released; None for not counting.
    """

    statistics: Statistics
    addends: tuple[Tensor, Tensor] | None = None
    hold: Hold | None = None


class _Waiting(NamedTuple):
    """The inputs of T: see :func:`.arithmetic.logits_gradient`."""

    exponentials: Tensor
    labels: Tensor
    hidden: Tensor
    hold: Hold | None


class OutputLayer:
    """Computes one rank's part, together with its tensor-parallel ranks.

    Args:
        part: its weight.
        config: the model's.
        backward: whether one follows.
        meter: counts activations; None for not counting.
    """

    def __init__(self, part: OutputPart, config: Any, *, backward: bool, meter: ActivationMeter | None) -> None:
        self._part, self._backward, self._meter = part, backward, meter
        self._group = parallel_state.get_tensor_model_parallel_group()
        self._sequence_parallel: bool = config.sequence_parallel and self._group.size() > 1
        self._fused: bool = config.gradient_accumulation_fusion
        self._waiting: dict[int, _Waiting] = {}
        self._store = WeightGradients()

    @property
    def trained(self) -> bool:
        """True if the weight gets a gradient."""
        return self._part.weight.requires_grad

    @torch.no_grad()
    def forward(self, microbatch: int, hidden: Tensor, labels: Tensor) -> Made:
        """S of the last stage's output ``hidden``, with ``labels`` (tokens,).

        Its shape is (sequence, microbatch, hidden), of sequence-parallel ranks their part.
        """
        weight, cut = self._part.rows(), self._part.cut
        hidden = hidden.to(weight.dtype).flatten(0, 1)
        logits = arithmetic.logits_of(self._gathered(hidden), weight)
        label = arithmetic.label_logits(logits, labels, cut)
        largest = self._reduced(logits.amax(1), dist.ReduceOp.MAX)
        exponentials = arithmetic.exponentials(logits, largest)
        del logits
        total = self._reduced(exponentials.sum(1), dist.ReduceOp.SUM)
        statistics = Statistics(largest, total, self._reduced(label, dist.ReduceOp.MAX))
        if not self._backward:
            return Made(statistics)
        exponentials = arithmetic.without_labels(exponentials.to(weight.dtype), labels, cut)
        addends = (
            self._scattered(exponentials @ weight),
            self._scattered(arithmetic.look_up(labels, weight, cut)),
        )
        if self.trained:
            self._waiting[microbatch] = _Waiting(exponentials, labels, hidden, self._held(exponentials, hidden))
        return Made(statistics, addends, self._held(*addends))

    def own(self, values: Tensor) -> Tensor:
        """Returns the part of ``values`` (tokens,) whose hidden states this rank has."""
        return values.chunk(self._group.size())[self._group.rank()] if self._sequence_parallel else values

    def weight_gradient(self, stage: int, microbatch: int, scale: Scales, gradient: Tensor) -> None:
        """T: adds to the weight's gradient, as a whole linear would.

        ``scale`` is what all ranks' statistics gave this one, ``gradient`` that of each token's loss, (tokens,).
        """
        exponentials, labels, hidden, hold = self._waiting.pop(microbatch)
        with torch.no_grad():
            logits = arithmetic.logits_gradient(exponentials, labels, self._part.cut, scale, gradient)
            hidden = self._gathered(hidden)
        weight: Any = self._part.weight
        fused = self._fused and hasattr(weight, "main_grad")

        def closure() -> Sequence[Tensor | None]:
            if not fused:
                return [logits.t().matmul(hidden)]
            add_to_main_grad(weight, hidden, logits)
            return [fused_gradient(weight, hidden.dtype)]

        with self._store.split(stage, microbatch):
            self._store.defer((stage, microbatch), closure, parameters=[weight])
        self._store.run(stage, microbatch)
        if hold is not None:
            hold.release()

    def _held(self, *tensors: Tensor) -> Hold | None:
        return None if self._meter is None else self._meter.hold(tensors)

    def _gathered(self, rows: Tensor) -> Tensor:
        """Returns the tokens of all sequence-parallel ranks, (tokens, hidden)."""
        if not self._sequence_parallel:
            return rows
        whole = rows.new_empty(rows.size(0) * self._group.size(), rows.size(1))
        stock.dist_all_gather_func(whole, rows.contiguous(), group=self._group)
        return whole

    def _scattered(self, rows: Tensor) -> Tensor:
        """Returns the sum over tensor-parallel ranks, of the tokens whose hidden states this rank has."""
        if not self._sequence_parallel:
            return self._reduced(rows, dist.ReduceOp.SUM)
        part = rows.new_empty(rows.size(0) // self._group.size(), rows.size(1))
        stock.dist_reduce_scatter_func(part, rows, group=self._group)
        return part

    def _reduced(self, values: Tensor, how: Any) -> Tensor:
        if self._group.size() > 1:
            dist.all_reduce(values, how, group=self._group)
        return values
