"""Megatron's model chunks as the engine's stages: stock's forward step, and a backward in one or two passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, NamedTuple

import torch
from megatron.core.pipeline_parallel.schedules import forward_step
from torch import Tensor
from torch.autograd.graph import GradientEdge

from megatron.schedules.integration.gradient_reduction import GradientReduction
from megatron.schedules.integration.offloaded_layers import forget_input
from megatron.schedules.integration.schedule_call import ScheduleCall
from megatron.schedules.integration.vocabulary.shared import Exchange, SharedVocabulary
from megatron.schedules.runtime.activation_meter import ActivationMeter
from megatron.schedules.runtime.graph_edge import InputGradient, as_input, edge_of
from megatron.schedules.runtime.offload import Offloads
from megatron.schedules.runtime.program import Op, Program
from megatron.schedules.runtime.recompute import Again
from megatron.schedules.runtime.stage_interface import Stages
from megatron.schedules.runtime.weight_gradients import WeightGradients
from megatron.schedules.schedule.kinds import Kind


class _InFlight(NamedTuple):
    """What is kept between F and the backward: what gets the input's gradient, and where in the graph to start.

    The edge, not the output: an output already sent would only take memory. The last stage's loss is the exception,
    since the scale of the gradients is applied to its value. None where nothing up to here is trained.
    """

    activation: Tensor | InputGradient | None
    start: GradientEdge | Tensor | None


class MegatronStages(Stages):
    """The model chunks of one rank during one call of the schedule.

    Args:
        program: what the rank is about to do.
        model: its chunks, in model order.
        config: their configuration.
        call: what was asked for.
        store: where split linears queue their weight gradients.
        running: entered round the forward of every stage.
        meter: counts the activations held; None for not counting.
        exchange: how ranks meet over a vocabulary that all share; None where they do not.
        again: where layers' forwards wait for their R; None where the program has none.
        offloads: takes activations to the host and back; None where the program has no O.
    """

    def __init__(
        self,
        program: Program,
        model: Sequence[torch.nn.Module],
        config: Any,
        call: ScheduleCall,
        store: WeightGradients,
        running: Callable[[int], AbstractContextManager[None]],
        meter: ActivationMeter | None = None,
        exchange: Exchange | None = None,
        again: Again | None = None,
        offloads: Offloads | None = None,
    ) -> None:
        self.losses: list[Any] = []
        self.tokens = torch.zeros([], dtype=torch.int, device="cuda")
        self._program, self._placement = program, program.placement
        self._model, self._config, self._call, self._store, self._meter = model, config, call, store, meter
        self._running, self._again, self._offloads = running, again, offloads
        self._in_flight: dict[tuple[int, int], _InFlight] = {}
        self._started = [False] * len(model)
        self._reduction = GradientReduction(model, overlapped=config.no_sync_func is not None and not call.forward_only)
        self._shared: SharedVocabulary | None = None
        if exchange is not None:
            self._shared = SharedVocabulary(
                self._placement, model, config, call, exchange, meter, self.losses, self.tokens
            )

    def finish(self) -> None:
        """Report and reduce what has not been; to be called once the program has ended well."""
        if self._shared is not None:
            with self._running(self._placement.last_stage):
                self._shared.report_losses()
        self._reduction.finish()

    def close(self) -> None:
        """Let stock reduce gradients again; to be called however the program ended."""
        self._reduction.close()

    def forward(
        self, stage: int, microbatch: int, activation: Tensor | None, *, split: bool, again: bool
    ) -> Tensor | None:
        """F: see :class:`megatron.schedules.runtime.stage_interface.Stages`."""
        self._begin(Kind.F, stage, microbatch)
        chunk, is_last = self._placement.chunk_of(stage), stage == self._placement.last_stage
        training, shared = not self._call.forward_only, self._shared
        away = training and self._program.offloads(stage, microbatch)
        step, samples, given = self._call.forward_step_func, self._call.data_iterators[chunk], activation
        taken: Tensor | InputGradient | None = activation
        if shared is not None and activation is not None and stage == 0:
            samples, given = shared.feed(activation), None
        elif activation is not None and away:
            given, taken = as_input(activation)
        elif activation is not None and training:
            activation.requires_grad_()
        if shared is not None and is_last:
            step = shared.last_step
        with self._around(stage, microbatch, split), self._relieved(stage, microbatch, given, again=again, away=away):
            output, tokens = forward_step(
                step,
                samples,
                self._model[chunk],
                self._call.num_microbatches,
                given,
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
                self.tokens += tokens  # elsewhere stock counts none, and in host memory
                start: GradientEdge | Tensor | None = output
            else:
                # Stock takes the last rank for the last stage and hands back its output in fp32.
                output = shared.ended(microbatch) if is_last and shared else output.to(self._config.pipeline_dtype)
                start = edge_of(output) if training and output.requires_grad else None
            if away:
                forget_input(self._model[chunk])
        if training:
            self._in_flight[stage, microbatch] = _InFlight(taken, start)
        return None if is_last else output

    def backward(self, stage: int, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        """B: see :class:`megatron.schedules.runtime.stage_interface.Stages`."""
        self._begin(Kind.B, stage, microbatch)
        return self._backward(stage, microbatch, gradient)

    def backward_input(self, stage: int, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        """I: see :class:`megatron.schedules.runtime.stage_interface.Stages`."""
        self._begin(Kind.I, stage, microbatch)
        with self._store.split(stage, microbatch):
            return self._backward(stage, microbatch, gradient)

    def backward_weight(self, stage: int, microbatch: int) -> None:
        """W: see :class:`megatron.schedules.runtime.stage_interface.Stages`."""
        self._begin(Kind.W, stage, microbatch)
        self._store.run(stage, microbatch, self._program.weight_after(Kind.W, stage, microbatch))

    def recompute_forward(self, stage: int, microbatch: int) -> None:
        """R: see :class:`megatron.schedules.runtime.stage_interface.Stages`."""
        self._begin(Kind.R, stage, microbatch)
        timers = self._config.timers
        if timers is not None:
            timers("forward-compute", log_level=2).start()
        assert self._again is not None
        with self._around(stage, microbatch, self._program.splits(stage, microbatch)):
            self._again.run(stage, microbatch)
        if timers is not None:
            timers("forward-compute").stop()

    def offload(self, stage: int, microbatch: int) -> None:
        """O: see :class:`megatron.schedules.runtime.stage_interface.Stages`."""
        assert self._offloads is not None
        self._offloads.offload(stage, microbatch)

    def load(self, stage: int, microbatch: int) -> None:
        """L: see :class:`megatron.schedules.runtime.stage_interface.Stages`."""
        assert self._offloads is not None
        self._offloads.load(stage, microbatch)

    def output_part(self, stage: int, microbatch: int, hidden: Tensor) -> None:
        """S: see :class:`megatron.schedules.runtime.stage_interface.Stages`."""
        self._begin(Kind.S, stage, microbatch)
        assert self._shared is not None
        self._shared.output_part(microbatch, hidden)

    def output_weight(self, stage: int, microbatch: int, weights: Tensor) -> None:
        """T: see :class:`megatron.schedules.runtime.stage_interface.Stages`."""
        self._begin(Kind.T, stage, microbatch)
        assert self._shared is not None
        self._shared.output_weight(stage, microbatch, weights)

    def add_embedding(self, microbatch: int, gradient: Tensor) -> None:
        """ADD: see :class:`megatron.schedules.runtime.stage_interface.Stages`."""
        self._begin(Op.ADD, self._placement.stages_of(self._program.rank)[0], microbatch)
        assert self._shared is not None
        self._shared.add_embedding(microbatch, gradient)

    def meet(self, op: Op, microbatch: int) -> Callable[[], Tensor | None]:
        """See :class:`megatron.schedules.runtime.stage_interface.Stages`."""
        assert self._shared is not None
        with self._running(0):  # whose forward may run ahead
            return self._shared.meet(op, microbatch)

    def reduce_gradients(self, stage: int) -> None:
        """See :class:`megatron.schedules.runtime.stage_interface.Stages`."""
        self._reduction.complete(self._placement.chunk_of(stage))

    def _begin(self, kind: Kind | Op, stage: int, microbatch: int) -> None:
        """Have the messages among replicas and among tensor-parallel ranks under way that may be so during this pass.

        All ranks of their groups do so at the same point, for they have one program. What a W right after this pass
        waits for first is gathered meanwhile; for the length of this pass one operand is so held as a whole.
        """
        self._reduction.begin_pass()
        ending = self._program.endings.get((kind, stage, microbatch))
        if ending is not None:
            elsewhere = {} if self._shared is None else self._shared.adds_to
            if kind in elsewhere:
                self._reduction.arriving(elsewhere[kind])
            else:
                chunk, later = self._placement.chunk_of(stage), set().union(*(elsewhere[op] for op in ending.later))
                late = self._adds_to(kind, stage, microbatch)
                self._reduction.completing(chunk, late, ending.passes_left, later)
        if isinstance(kind, Kind) and kind is not Kind.W:
            after = self._program.weight_after(kind, stage, microbatch)
            if after is not None:
                self._store.prefetch(*after)

    def _adds_to(self, kind: Kind | Op, stage: int, microbatch: int) -> set[Tensor] | None:
        """The parameters whose gradients a backward of a stage's weights adds to; None for perhaps all."""
        if kind is Kind.W:
            return self._store.parameters(stage, microbatch)
        if self._shared is None:
            return None
        own: set[Tensor] = set(self._model[self._placement.chunk_of(stage)].parameters())
        return own.difference(*self._shared.adds_to.values())

    def _backward(self, stage: int, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        timers, shared = self._config.timers, self._shared
        if shared is not None and gradient is not None and stage == self._placement.last_stage:
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
            with self._counted():  # what Megatron does again inside
                torch.autograd.backward(start, gradient)
        if timers is not None:
            timers("backward-compute").stop()
        result = None if activation is None else activation.grad
        if shared is not None and stage == 0:
            shared.embedded(microbatch, result)
        return result

    def _around(self, stage: int, microbatch: int, split: bool) -> AbstractContextManager[Any]:
        stack = ExitStack()
        stack.enter_context(self._running(stage))
        if split:
            stack.enter_context(self._store.split(stage, microbatch))
        stack.enter_context(self._counted())
        return stack

    def _counted(self) -> AbstractContextManager[None]:
        """While tensors are saved for a backward, those that are to be counted are."""
        if self._meter is None or self._call.forward_only:
            return nullcontext()
        return self._meter.recording()

    def _relieved(
        self, stage: int, microbatch: int, given: Tensor | None, *, again: bool, away: bool
    ) -> AbstractContextManager[Any]:
        """Round a forward, which begins with ``given``: layers wait for their R, what others save goes to the host."""
        stack = ExitStack()
        if again:
            assert self._again is not None
            stack.enter_context(self._again.keeping(stage, microbatch))
        if away:
            assert self._offloads is not None
            stack.enter_context(self._offloads.forward(stage, microbatch, () if given is None else (given,)))
        return stack

    def _is_first(self, chunk: int) -> bool:
        first, self._started[chunk] = not self._started[chunk], True
        # Stock's rule: weights cached for the first validation step are still good in the next ones.
        if self._call.forward_only and self._call.first_val_step is not None:
            return self._call.first_val_step and first
        return first
