"""Vocabulary parallelism in one call of the schedule: its collectives, and what first and last stage do instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.schedules import forward_step_calc_loss
from torch import Tensor

from megatron.schedules.integration.schedule_call import ScheduleCall
from megatron.schedules.integration.vocabulary import arithmetic
from megatron.schedules.integration.vocabulary.arithmetic import Scales, Statistics
from megatron.schedules.integration.vocabulary.output import Made, OutputLayer
from megatron.schedules.integration.vocabulary.parts import parts_of
from megatron.schedules.integration.vocabulary.user_step import EarlyTokens, LateLosses
from megatron.schedules.programs.program import Op
from megatron.schedules.runtime.activation_meter import ActivationMeter
from megatron.schedules.schedule.kinds import Kind
from megatron.schedules.schedule.placement import Placement

Chain = Callable[[], Tensor | None]


class Exchange(NamedTuple):
    """The ranks and tensors of collectives.

    Args:
        group: the pipeline's ranks; used by collectives alone.
        hidden: the shape of hidden states, (sequence, microbatch, hidden), of sequence-parallel ranks their part.
        tokens: that of a microbatch's tokens and labels, (microbatch, sequence).
        dtype: of hidden states.
        device: of all tensors.
    """

    group: dist.ProcessGroup
    hidden: tuple[int, ...]
    tokens: tuple[int, int]
    dtype: torch.dtype
    device: torch.device


class SharedVocabulary:
    """The work of a rank on its parts of the embedding and the output layer, by microbatch.

    Collectives run on a thread or a stream of their own, in the order in which they were posted. Their results here are
    read by a pass that waits for them, or by a later collective.

    Args:
        placement: where stages are.
        model: this rank's chunks.
        config: theirs.
        call: the arguments of the schedule's call.
        exchange: the ranks and tensors of collectives.
        meter: counts activations; None for not counting.
        reported: takes the user's losses, on the last stage's rank.
        token_count: incremented by the number of tokens that count.

    Attributes:
        last_step: the user's forward step as the last stage runs it.
        adds_to: the parameters that ADD and T give gradients to.
    """

    def __init__(
        self,
        placement: Placement,
        model: Sequence[torch.nn.Module],
        config: Any,
        call: ScheduleCall,
        exchange: Exchange,
        meter: ActivationMeter | None,
        reported: list[Any],
        token_count: Tensor,
    ) -> None:
        parts = parts_of(model)
        if parts is None:
            raise RuntimeError("--pipeline-vocabulary-parallel: the model was not built by Megatron's training loop")
        backward = not call.forward_only
        self._embedding, self._output_part, self._model, self._exchange = *parts, model[0], exchange
        self._early = EarlyTokens(call.forward_step_func, call.data_iterators[0], parts.embedding)
        self._output = OutputLayer(parts.output, config, backward=backward, meter=meter)
        calculate = partial(
            forward_step_calc_loss,
            model=model[-1],
            config=config,
            vp_stage=len(model) - 1 if len(model) > 1 else None,
            collect_non_loss_data=False,
            num_microbatches=call.num_microbatches,
            forward_data_store=reported,
            cp_group_size=call.cp_size,
            is_last_stage=True,
        )
        self._late = LateLosses(call.forward_step_func, calculate, config, token_count)
        self.last_step = self._late.step
        self.adds_to: Mapping[Kind | Op, set[Tensor]] = {
            Op.ADD: {parts.embedding.weight},
            Kind.T: {parts.output.weight},
        }
        self._group, self._rank = exchange.group, dist.get_rank(exchange.group)
        self._first, self._last = placement.rank_of[0], placement.rank_of[-1]
        self._embeds_trained = backward and parts.embedding.weight.requires_grad
        self._tokens: dict[int, Tensor] = {}
        self._ends: dict[int, tuple[Tensor, Tensor]] = {}
        self._loss_functions: dict[int, Any] = {}
        self._labels: dict[int, Tensor] = {}
        self._made: dict[int, Made] = {}
        self._losses: dict[int, Tensor] = {}
        self._scales: dict[int, Scales] = {}
        self._weights: dict[int, Tensor] = {}
        self._embedded: dict[int, Tensor] = {}
        self._chains = {
            Op.EMBED: self._embed,
            Op.OUTPUT: self._broadcast_hidden,
            Op.SUM: self._sum,
            Op.WEIGH: self._weigh,
            Op.EMBED_BACK: self._embed_back,
        }

    def collective(self, op: Op, microbatch: int) -> Chain:
        """Returns this rank's part in a collective; see :class:`.stage_interface.Stages`."""
        return self._chains[op](microbatch)

    def feed(self, looked_up: Tensor) -> Iterator[Any] | None:
        """Before stage 0's forward: passes it the result of EMBED; returns its samples."""
        if self._embeds_trained:
            looked_up.requires_grad_()
        self._embedding.looked_up = looked_up
        return self._early.replay()

    def ended(self, microbatch: int) -> Tensor:
        """After the last stage's forward: returns its hidden states, with their history."""
        hidden, labels = self._output_part.take()
        hidden = hidden.to(self._exchange.dtype)
        self._ends[microbatch] = hidden.detach().contiguous(), labels.contiguous()
        self._loss_functions[microbatch] = self._late.take()
        return hidden

    def output_part(self, microbatch: int, hidden: Tensor) -> None:
        """S."""
        labels = self._labels.pop(microbatch).t().reshape(-1)
        self._made[microbatch] = self._output.forward(microbatch, hidden, labels)

    def loss_gradient(self, microbatch: int, total: Tensor) -> Tensor:
        """In the last stage's backward: reports the loss; returns the gradient of the stage's output.

        ``total``, the result of SUM, is the gradient of the sum of all tokens' losses.
        """
        gradient = self._late.gradient(*self._loss(microbatch))
        self._weights[microbatch] = gradient
        own = self._output.own(_by_token(gradient)).view(*total.shape[:2], 1)
        return (total * own).to(self._exchange.dtype)

    def report_losses(self) -> None:
        """Reports the losses of all microbatches if no backward follows. On the last stage's rank only."""
        for microbatch in sorted(self._losses):
            self._late.report(*self._loss(microbatch))

    def output_weight(self, stage: int, microbatch: int, weights: Tensor) -> None:
        """T."""
        scale = self._scales.pop(microbatch)
        if self._output.trained:
            self._output.weight_gradient(stage, microbatch, scale, _by_token(weights))

    def embedded(self, microbatch: int, gradient: Tensor | None) -> None:
        """After stage 0's backward: keeps the gradient of the result of EMBED."""
        if self._embeds_trained:
            assert gradient is not None, "the first stage's backward gave the embedding no gradient"
            self._embedded[microbatch] = gradient

    def add_embedding(self, microbatch: int, gradient: Tensor) -> None:
        """ADD."""
        if self._embeds_trained:
            part, tokens = self._embedding, self._tokens.pop(microbatch)
            with torch.enable_grad():
                embedded = arithmetic.look_up(tokens, part.weight, part.cut, deterministic=part.deterministic)
            torch.autograd.backward(embedded, gradient)

    def _loss(self, microbatch: int) -> tuple[Tensor, Any]:
        """Returns each token's loss, (microbatch, sequence), and the user's function."""
        rows, length = self._exchange.tokens
        losses = self._losses.pop(microbatch).view(length, rows).t().contiguous()
        return losses, self._loss_functions.pop(microbatch)

    def _embed(self, microbatch: int) -> Chain:
        first = self._rank == self._first
        tokens = self._early.read(self._model).contiguous() if first else None
        weight, cut = self._embedding.rows().detach(), self._embedding.cut

        def chain() -> Tensor | None:
            known = self._broadcast(tokens, self._exchange.tokens, torch.int64, self._first)
            if self._embeds_trained:
                self._tokens[microbatch] = known
            embedded = arithmetic.look_up(known, weight, cut)
            dist.reduce(embedded, group_dst=self._first, group=self._group)
            return embedded if first else None

        return chain

    def _broadcast_hidden(self, microbatch: int) -> Chain:
        hidden, labels = self._ends.pop(microbatch, (None, None))

        def chain() -> Tensor:
            spread = self._broadcast(hidden, self._exchange.hidden, self._exchange.dtype, self._last)
            self._labels[microbatch] = self._broadcast(labels, self._exchange.tokens, torch.int64, self._last)
            return spread

        return chain

    def _sum(self, microbatch: int) -> Chain:
        statistics, addends, hold = self._made.pop(microbatch)
        last = self._rank == self._last

        def chain() -> Tensor | None:
            own = torch.stack(statistics)
            every = own.new_empty(self._group.size(), *own.shape)
            dist.all_gather(list(every.unbind()), own, group=self._group)
            scale = arithmetic.scales(Statistics(*every.unbind(1)), statistics.largest)
            if last:
                self._losses[microbatch] = scale.loss
            if addends is None:
                return None
            self._scales[microbatch] = scale
            others, label = addends
            total = arithmetic.hidden_gradient(
                others, label, self._output.own(scale.own), self._output.own(scale.label)
            )
            # To all ranks, not to one: the order of the sum then does not depend on where the last stage is.
            dist.all_reduce(total, group=self._group)
            if hold is not None:
                hold.release()
            return total.view(self._exchange.hidden) if last else None

        return chain

    def _weigh(self, microbatch: int) -> Chain:
        weights = self._weights.pop(microbatch, None)
        return lambda: self._broadcast(weights, self._exchange.tokens, torch.float32, self._last)

    def _embed_back(self, microbatch: int) -> Chain:
        if not self._embeds_trained:
            return lambda: torch.empty(0, device=self._exchange.device)
        gradient, weight = self._embedded.pop(microbatch, None), self._embedding.weight
        kept = None if gradient is None else gradient.contiguous()
        return lambda: self._broadcast(kept, (*self._exchange.tokens, weight.size(1)), weight.dtype, self._first)

    def _broadcast(self, own: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, source: int) -> Tensor:
        """Returns the tensor of the rank ``source``, on all ranks."""
        tensor = torch.empty(shape, dtype=dtype, device=self._exchange.device) if own is None else own
        dist.broadcast(tensor, group_src=source, group=self._group)
        return tensor


def _by_token(values: Tensor) -> Tensor:
    """(microbatch, sequence) as (tokens,), in the order of hidden states."""
    return values.t().reshape(-1)
