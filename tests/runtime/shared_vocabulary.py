"""Plain stages whose embedding and output layer are cut along the vocabulary over all ranks, and their oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron.schedules.programs.checker import proved
from megatron.schedules.programs.program import Op, Program
from megatron.schedules.runtime.weight_gradients import WeightGradients
from megatron.schedules.schedule.schedule import Schedule
from tests.programs.random_schedules import shared_costs
from tests.runtime.plain_stages import SHAPE, make_stage

WORDS = 12
"""In the vocabulary; a multiple of the ranks of every test."""

Gather = Callable[[Tensor], list[Tensor]]
"""What the tensors of all ranks are, in their order, given this rank's."""


def lowered(schedule: Schedule) -> tuple[Program, ...]:
    """The programs of ``schedule`` under :func:`shared_costs`, proved."""
    programs = proved(schedule, shared_costs(4 * schedule.ranks).on(schedule.placement))
    return programs


class Batch(NamedTuple):
    """One microbatch: by token its word, the word to predict, and the gradient of its loss."""

    words: Tensor
    labels: Tensor
    weights: Tensor


def batch(microbatch: int) -> Batch:
    generator = torch.Generator().manual_seed(1000 + microbatch)
    words, labels = torch.randint(WORDS, (2, SHAPE[0]), generator=generator)
    return Batch(words, labels, torch.rand(SHAPE[0], generator=generator, dtype=torch.float64))


def make_ends() -> tuple[Tensor, Tensor]:
    """Embedding and output layer, whole."""
    generator = torch.Generator().manual_seed(77)
    embedding, output = torch.randn((2, WORDS, SHAPE[1]), generator=generator, dtype=torch.float64)
    return embedding, output


class _Part(NamedTuple):
    """What S leaves: to SUM its statistics and unscaled gradients, to T the unscaled probabilities."""

    statistics: Tensor
    others: Tensor
    own: Tensor
    powers: Tensor
    mine: Tensor
    hidden: Tensor


class SharingStages:
    """The stages of one rank (see :class:`megatron.schedules.runtime.stage_interface.Stages`), in fp64.

    Its part of the vocabulary begins at word ``begin``.
    """

    def __init__(self, program: Program, gather: Gather) -> None:
        placement, rank = program.placement, program.rank
        self._gather, self._last_stage = gather, placement.last_stage
        self._first_rank, self._last_rank, self._rank = placement.rank_of[0], placement.rank_of[-1], rank
        self._training = any(action.op is Op.ADD for action in program.actions)
        size = WORDS // placement.ranks
        self.begin, own = rank * size, slice(rank * size, (rank + 1) * size)
        self._embedding, self._output = (whole[own].clone() for whole in make_ends())
        self.embedding_grad, self.output_grad = torch.zeros_like(self._embedding), torch.zeros_like(self._output)
        self.store = WeightGradients()
        self.modules = {stage: make_stage(stage, self.store).double() for stage in placement.stages_of(rank)}
        self.losses: dict[int, Tensor] = {}
        self.reduced: list[int] = []
        self._open: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._words: dict[int, Tensor] = {}
        self._labels: dict[int, Tensor] = {}
        self._parts: dict[int, _Part] = {}
        self._scales: dict[int, tuple[Tensor, Tensor]] = {}
        self._kept: dict[tuple[Op, int], Tensor] = {}

    def forward(
        self, stage: int, microbatch: int, activation: Tensor | None, *, split: bool, recompute: bool
    ) -> Tensor:
        assert activation is not None and activation.is_leaf
        if split:
            with self.store.split(stage, microbatch):
                output = self.modules[stage](activation.requires_grad_())
        else:
            output = self.modules[stage](activation.requires_grad_())
        if self._training:
            self._open[stage, microbatch] = activation, output
        if stage == self._last_stage:
            self._kept[Op.OUTPUT, microbatch] = output.detach()
        return output

    def backward(self, stage: int, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        assert gradient is not None
        if stage == self._last_stage:
            self._kept[Op.WEIGH, microbatch] = batch(microbatch).weights
            gradient = gradient * batch(microbatch).weights[:, None]
        activation, output = self._open.pop((stage, microbatch))
        torch.autograd.backward(output, gradient)
        assert activation.grad is not None
        if stage == 0:
            self._kept[Op.EMBED_BACK, microbatch] = activation.grad
        return activation.grad

    def backward_input(self, stage: int, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        with self.store.input_gradient(stage, microbatch):
            return self.backward(stage, microbatch, gradient)

    def backward_weight(self, stage: int, microbatch: int) -> None:
        self.store.run(stage, microbatch)

    def reduce_gradients(self, stage: int) -> None:
        self.reduced.append(stage)

    def output_part(self, stage: int, microbatch: int, hidden: Tensor) -> None:
        logits = hidden @ self._output.t()
        highest = logits.max(1).values
        powers = (logits - highest[:, None]).exp()
        mine = self._own(self._labels.pop(microbatch))
        at_label = (logits * mine).sum(1)
        statistics = torch.stack([highest, powers.sum(1), at_label])
        powers = powers * (1 - mine)
        self._parts[microbatch] = _Part(
            statistics, powers @ self._output, mine @ self._output, powers, mine, hidden.clone()
        )

    def output_weight(self, stage: int, microbatch: int, weights: Tensor) -> None:
        part, (scale, less) = self._parts.pop(microbatch), self._scales.pop(microbatch)
        logits_grad = part.powers * scale[:, None] + part.mine * less[:, None]
        self.output_grad += (logits_grad * weights[:, None]).t() @ part.hidden

    def add_embedding(self, microbatch: int, gradient: Tensor) -> None:
        self.embedding_grad += self._own(self._words.pop(microbatch)).t() @ gradient

    def collective(self, op: Op, microbatch: int) -> Callable[[], Tensor | None]:
        if op is Op.EMBED:
            words = batch(microbatch).words if self._rank == self._first_rank else torch.zeros(SHAPE[0]).long()
            return lambda: self._embed(microbatch, words)
        if op is Op.OUTPUT:
            labels = batch(microbatch).labels if self._rank == self._last_rank else torch.zeros(SHAPE[0]).long()
            hidden = self._kept.pop((op, microbatch), torch.zeros(SHAPE, dtype=torch.float64))
            return lambda: self._bring_output(microbatch, hidden, labels)
        if op is Op.SUM:
            part = self._parts[microbatch]
            return lambda: self._sum(microbatch, part)
        source = self._last_rank if op is Op.WEIGH else self._first_rank
        shape = SHAPE[:1] if op is Op.WEIGH else SHAPE
        brought = self._kept.pop((op, microbatch), torch.zeros(shape, dtype=torch.float64))
        return lambda: self._gather(brought)[source]

    def _embed(self, microbatch: int, words: Tensor) -> Tensor | None:
        words = self._gather(words)[self._first_rank]
        if self._training:
            self._words[microbatch] = words
        looked_up = sum(self._gather(self._own(words) @ self._embedding))
        return looked_up if self._rank == self._first_rank else None  # type: ignore[return-value]

    def _bring_output(self, microbatch: int, hidden: Tensor, labels: Tensor) -> Tensor:
        self._labels[microbatch] = self._gather(labels)[self._last_rank]
        return self._gather(hidden)[self._last_rank]

    def _sum(self, microbatch: int, part: _Part) -> Tensor | None:
        highest, powers, at_label = torch.stack(self._gather(part.statistics)).unbind(1)
        top = highest.max(0).values
        log_sum = (powers * (highest - top).exp()).sum(0).log() + top
        loss = log_sum - at_label.sum(0)
        scale, less = (part.statistics[0] - log_sum).exp(), torch.expm1(-loss)
        gradient = sum(self._gather(part.others * scale[:, None] + part.own * less[:, None]))
        if self._training:
            self._scales[microbatch] = scale, less
        else:
            del self._parts[microbatch]
        if self._rank != self._last_rank:
            return None
        self.losses[microbatch] = loss
        return gradient  # type: ignore[return-value]

    def _own(self, words: Tensor) -> Tensor:
        """(tokens, words of this rank): 1 where a token is that word, else 0."""
        own = torch.arange(self.begin, self.begin + len(self._output))
        return (words[:, None] == own).double()

    def gradients(self) -> list[Tensor | None]:
        """Of this rank's parts and of its stages' parameters, in order."""
        self.store.assert_empty()
        left = [self._open, self._words, self._labels, self._parts, self._scales, self._kept]
        assert not any(left), "all that was kept has been used"
        own = [p.grad for stage in sorted(self.modules) for p in self.modules[stage].parameters()]
        return [self.embedding_grad, self.output_grad, *own]


class Expected(NamedTuple):
    """What the whole model gives: gradients of its ends and by stage, losses of each microbatch's tokens."""

    embedding: Tensor
    output: Tensor
    stages: list[list[Tensor | None]]
    losses: dict[int, Tensor]


def without_sharing(schedule: Schedule) -> Expected:
    """The same on one process by plain autograd."""
    embedding, output = (end.clone().requires_grad_() for end in make_ends())
    stages = [make_stage(stage, WeightGradients()).double() for stage in range(schedule.placement.stages)]
    losses = {}
    for m in range(schedule.microbatches):
        words, labels, weights = batch(m)
        logits = nn.Sequential(*stages)(embedding[words]) @ output.t()
        loss = nn.functional.cross_entropy(logits, labels, reduction="none")
        (loss * weights).sum().backward()
        losses[m] = loss.detach()
    assert embedding.grad is not None and output.grad is not None
    return Expected(embedding.grad, output.grad, [[p.grad for p in stage.parameters()] for stage in stages], losses)
