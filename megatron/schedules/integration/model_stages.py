"""Megatron's model chunks as stages of the engine: stock's forward step, and a backward in one or two passes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from megatron.core.pipeline_parallel.schedules import forward_step
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor
from torch.autograd.graph import GradientEdge

from megatron.schedules.integration.gradient_reduction import GradientReduction
from megatron.schedules.integration.model_binding import Deferred
from megatron.schedules.integration.schedule_call import ScheduleCall
from megatron.schedules.integration.vocabulary.shared import Exchange, SharedVocabulary
from megatron.schedules.programs.program import Op, Program
from megatron.schedules.runtime.activation_meter import ActivationMeter
from megatron.schedules.runtime.behind_messages import ComingWeights, MessageBudget
from megatron.schedules.runtime.graph_edge import InputGradient, as_input, backward_from, edge_of
from megatron.schedules.runtime.recompute import WITHOUT_RECOMPUTE
from megatron.schedules.runtime.stage_interface import Stages
from megatron.schedules.schedule.kinds import Kind

_AS_IT_IS = nullcontext()


class _InFlight(NamedTuple):
    """State between F and the backward: the tensor that receives the input's gradient, and the start of the backward.

    The start is an edge of the autograd graph, not the output tensor, to save memory. The last stage's loss is an
    exception, because gradients are scaled through its value. None if no parameter up to this stage is trained.
    """

    activation: Tensor | InputGradient | None
    start: GradientEdge | Tensor | None


class MegatronStages(Stages):
    """Model chunks of one rank during one call of the schedule.

    Args:
        program: program of the rank.
        model: its chunks, in model order.
        config: configuration of the chunks.
        call: arguments of the schedule's call.
        deferred: weight gradients of split linears, and what R, O and L do.
        running: context manager around the forward of every stage.
        meter: counts activations; None for no counting.
        exchange: collectives of vocabulary parallelism; None without it.
        budget: of weight gradients behind messages; None if none are hidden.
    """

    def __init__(
        self,
        program: Program,
        model: Sequence[torch.nn.Module],
        config: Any,
        call: ScheduleCall,
        deferred: Deferred,
        running: Callable[[int], AbstractContextManager[None]],
        meter: ActivationMeter | None = None,
        exchange: Exchange | None = None,
        budget: MessageBudget | None = None,
    ) -> None:
        self.losses: list[Any] = []
        self.tokens = torch.zeros([], dtype=torch.int, device="cuda")
        self._program, self._placement = program, program.placement
        self._last, self._training = program.placement.last_stage, not call.forward_only
        self._model, self._config, self._call, self._meter = model, config, call, meter
        self._store, self._recomputes, self._offloads = deferred
        self._running, self._budget = running, budget
        self._in_flight: dict[tuple[int, int], _InFlight] = {}
        self._started = [False] * len(model)
        self._coming = None if budget is None else ComingWeights(program)
        self._reduction = GradientReduction(model, overlapped=config.no_sync_func is not None and not call.forward_only)
        self._shared: SharedVocabulary | None = None
        if exchange is not None:
            self._shared = SharedVocabulary(
                self._placement, model, config, call, exchange, meter, self.losses, self.tokens
            )

    @property
    def partial_gradients(self) -> Collection[int]:
        """Parameters whose hooks have seen parts of gradients: :attr:`.ParameterLeaves.partial`."""
        return self._store.leaves.partial

    def finish(self) -> None:
        """Reports losses and reduces the remaining gradients. Call it only after the program succeeded."""
        if self._shared is not None:
            with self._running(self._last):
                self._shared.report_losses()
        self._reduction.finish()

    def close(self) -> None:
        """Restores stock's gradient reduction. Call it after every program, also after an error."""
        self._reduction.close()

    def forward(
        self, stage: int, microbatch: int, activation: Tensor | None, *, split: bool, recompute: bool
    ) -> Tensor | None:
        self._begin(Kind.F, stage, microbatch)
        chunk, is_last = self._placement.chunk_of(stage), stage == self._last
        training, shared = self._training, self._shared
        offload = training and self._program.offloads(stage, microbatch)
        step, samples, input = self._call.forward_step_func, self._call.data_iterators[chunk], activation
        taken: Tensor | InputGradient | None = activation
        if shared is not None and activation is not None and stage == 0:
            samples, input = shared.feed(activation), None
        elif activation is not None and offload:
            input, taken = as_input(activation)
        elif activation is not None and training:
            activation.requires_grad_()
        if shared is not None and is_last:
            step = shared.last_step
        spared = self._spared(stage, microbatch, input, recompute, offload) if recompute or offload else _AS_IT_IS
        with self._running(stage), self._split(stage, microbatch, split), self._counted(), spared:
            output, tokens = forward_step(
                step,
                samples,
                self._model[chunk],
                self._call.num_microbatches,
                input,
                self.losses,
                self._config,
                cp_group_size=self._call.cp_size,
                collect_non_loss_data=False,
                is_first_microbatch=self._is_first(chunk),
                current_microbatch=microbatch,
                vp_stage=chunk if len(self._model) > 1 else None,
                is_last_stage=is_last and shared is None,
            )
            if is_last and shared is None:
                self.tokens += tokens  # on other stages stock counts no tokens, and on the host
                start: GradientEdge | Tensor | None = output
            else:
                # Stock assumes that the last rank has the last stage, and returns its output in fp32.
                output = shared.ended(microbatch) if is_last and shared else output.to(self._config.pipeline_dtype)
                start = edge_of(output) if training and output.requires_grad else None
            if offload:
                # Stock otherwise stores the chunk's input until the next microbatch.
                get_attr_wrapped_model(self._model[chunk], "set_input_tensor")([None])
        if training:
            self._in_flight[stage, microbatch] = _InFlight(taken, start)
        return None if is_last else output

    def backward(self, stage: int, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        self._begin(Kind.B, stage, microbatch)
        result = self._backward(stage, microbatch, gradient)
        self._ended(Kind.B, stage, microbatch)
        return result

    def backward_input(self, stage: int, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        self._begin(Kind.I, stage, microbatch)
        with self._store.input_gradient(stage, microbatch):
            result = self._backward(stage, microbatch, gradient)
        self._ended(Kind.I, stage, microbatch)
        return result

    def backward_weight(self, stage: int, microbatch: int) -> None:
        self._begin(Kind.W, stage, microbatch)
        self._store.run(stage, microbatch, self._program.weights_after.get((Kind.W, stage, microbatch)))
        self._ended(Kind.W, stage, microbatch)

    def run_ahead(self, sent: int) -> None:
        """Computes weight gradients that are due, ahead of their W, behind a message of ``sent`` bytes.

        See :meth:`.WeightGradients.run_ahead`.
        """
        assert self._budget is not None and self._coming is not None
        self._budget.left(self._store.run_ahead(self._coming.due(), self._budget.behind(sent)))

    def recompute_forward(self, stage: int, microbatch: int) -> None:
        self._begin(Kind.R, stage, microbatch)
        timers = self._config.timers
        if timers is not None:
            timers("forward-compute", log_level=2).start()
        assert self._recomputes is not None
        split = self._program.splits(stage, microbatch)
        with self._running(stage), self._split(stage, microbatch, split), self._counted():
            self._recomputes.run(stage, microbatch)
        if timers is not None:
            timers("forward-compute").stop()

    def offload(self, stage: int, microbatch: int) -> None:
        assert self._offloads is not None
        self._offloads.offload(stage, microbatch)

    def load(self, stage: int, microbatch: int) -> None:
        assert self._offloads is not None
        self._offloads.load(stage, microbatch)

    def output_part(self, stage: int, microbatch: int, hidden: Tensor) -> None:
        self._begin(Kind.S, stage, microbatch)
        assert self._shared is not None
        self._shared.output_part(microbatch, hidden)

    def output_weight(self, stage: int, microbatch: int, weights: Tensor) -> None:
        self._begin(Kind.T, stage, microbatch)
        assert self._shared is not None
        self._shared.output_weight(stage, microbatch, weights)

    def add_embedding(self, microbatch: int, gradient: Tensor) -> None:
        self._begin(Op.ADD, self._placement.stages_of(self._program.rank)[0], microbatch)
        assert self._shared is not None
        self._shared.add_embedding(microbatch, gradient)

    def collective(self, op: Op, microbatch: int) -> Callable[[], Tensor | None]:
        assert self._shared is not None
        with self._running(0):  # its forward may run ahead
            return self._shared.collective(op, microbatch)

    def reduce_gradients(self, stage: int) -> None:
        self._reduction.complete(self._placement.chunk_of(stage))

    def _begin(self, kind: Kind | Op, stage: int, microbatch: int) -> None:
        """Starts data-parallel and tensor-parallel communication that can overlap this pass.

        All ranks of a group do so at the same point, because they run the same program. The first operand of a W that
        follows this pass is gathered during the pass, and its full size is allocated meanwhile.
        """
        self._reduction.begin_pass()
        if self._budget is not None and isinstance(kind, Kind):
            self._budget.begin(kind, stage)
        this = kind, stage, microbatch
        ending = self._program.endings.get(this)
        if ending is not None:
            elsewhere = {} if self._shared is None else self._shared.adds_to
            if kind in elsewhere:
                self._reduction.arriving(elsewhere[kind])
            else:
                chunk, later = self._placement.chunk_of(stage), set().union(*(elsewhere[op] for op in ending.later))
                late = self._adds_to(kind, stage, microbatch)
                self._reduction.completing(chunk, late, ending.passes_left, later)
        after = self._program.weights_after.get(this)
        if after is not None and kind is not Kind.W:
            self._store.prefetch(*after)

    def _ended(self, kind: Kind, stage: int, microbatch: int) -> None:
        """Notes the end of a backward where weight gradients run behind messages."""
        if self._budget is not None and self._coming is not None:
            self._coming.ended(kind, stage, microbatch)
            if kind is Kind.I:
                self._budget.deferred(stage, self._store.flops(stage, microbatch))

    def _adds_to(self, kind: Kind | Op, stage: int, microbatch: int) -> set[Tensor] | None:
        """Returns the parameters to whose gradients a stage's weight backward adds; None if it may be all."""
        if kind is Kind.W:
            return self._store.parameters(stage, microbatch)
        if self._shared is None:
            return None
        own: set[Tensor] = set(self._model[self._placement.chunk_of(stage)].parameters())
        return own.difference(*self._shared.adds_to.values())

    def _backward(self, stage: int, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        timers, shared = self._config.timers, self._shared
        if shared is not None and gradient is not None and stage == self._last:
            with self._running(stage):
                gradient = shared.loss_gradient(microbatch, gradient)
        if timers is not None:
            timers("backward-compute", log_level=2).start()
        if self._offloads is not None and self._program.offloads(stage, microbatch):
            self._offloads.arrive(stage, microbatch)
        activation, start = self._in_flight.pop((stage, microbatch))
        if start is not None:
            if gradient is None and self._config.grad_scale_func is not None:
                start = self._config.grad_scale_func(start)
            with self._counted():  # tensors that Megatron recomputes inside the backward
                backward_from(start, gradient)
        if timers is not None:
            timers("backward-compute").stop()
        result = None if activation is None else activation.grad
        if shared is not None and stage == 0:
            shared.embedded(microbatch, result)
        return result

    def _split(self, stage: int, microbatch: int, split: bool) -> AbstractContextManager[None]:
        return self._store.split(stage, microbatch) if split else _AS_IT_IS

    @contextmanager
    def _spared(
        self, stage: int, microbatch: int, input: Tensor | None, recompute: bool, offload: bool
    ) -> Iterator[None]:
        """Surrounds a forward whose activations are recomputed or offloaded."""
        with ExitStack() as stack:
            if recompute and self._recomputes is not None:
                stack.enter_context(self._recomputes.forward(stage, microbatch))
                refusal = (
                    f"stage {stage}, microbatch {microbatch}: a backward in the forward or the loss asks for the "
                    f"gradient of a weight in a layer that the plan recomputes; {WITHOUT_RECOMPUTE}"
                )
                stack.enter_context(self._store.leaves.without_graph(self._recomputes.parameters, refusal))
            if offload and self._offloads is not None:
                stack.enter_context(self._offloads.forward(stage, microbatch, () if input is None else (input,)))
            yield

    def _counted(self) -> AbstractContextManager[None]:
        """Makes the meter, if any, count the tensors saved for a backward."""
        if self._meter is None or not self._training:
            return _AS_IT_IS
        return self._meter.recording()

    def _is_first(self, chunk: int) -> bool:
        first, self._started[chunk] = not self._started[chunk], True
        # As in stock: weights cached for the first validation step stay valid for the next ones.
        if self._call.forward_only and self._call.first_val_step is not None:
            return self._call.first_val_step and first
        return first
