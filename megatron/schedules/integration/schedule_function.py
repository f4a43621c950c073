"""The schedule function: what stock's training loop calls in place of its own forward-backward functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_model_config
from megatron.training import print_rank_last

from megatron.schedules.integration.flags.declared import FLAGS
from megatron.schedules.integration.flags.planner import Planner
from megatron.schedules.integration.late_checks import LateChecks
from megatron.schedules.integration.layers import mtp, tied
from megatron.schedules.integration.layers.losses import LossRelay
from megatron.schedules.integration.layers.recompute import capture_state, recompute_layers
from megatron.schedules.integration.lengths.background import LengthsBeside, Planned, Sizes, in_loaders_order
from megatron.schedules.integration.linears.local import split_linears
from megatron.schedules.integration.linears.transformer_engine import split_te_linears
from megatron.schedules.integration.log.iteration_watcher import CallWatcher
from megatron.schedules.integration.messages import Messages
from megatron.schedules.integration.model_stages import MegatronStages
from megatron.schedules.integration.offloaded_layers import CopySpeed, begin
from megatron.schedules.integration.peak_memory import PeakMemory
from megatron.schedules.integration.profiling import Profiler, Watching
from megatron.schedules.integration.schedule_call import ScheduleCall
from megatron.schedules.integration.timers import events_in
from megatron.schedules.integration.vocabulary.shared import Exchange
from megatron.schedules.runtime.activation_meter import ActivationMeter
from megatron.schedules.runtime.engine import Observer, run
from megatron.schedules.runtime.offload import Offloads
from megatron.schedules.runtime.position import PositionTracker
from megatron.schedules.runtime.program import Program
from megatron.schedules.runtime.recompute import Recomputes
from megatron.schedules.runtime.stall_watch import StallWatch
from megatron.schedules.runtime.transport import MessageSpec, Transport
from megatron.schedules.runtime.weight_gradients import WeightGradients


class _Measuring(NamedTuple):
    """What a call measures of itself.

    Args:
        peak: the most that its activations hold.
        profiled: what its passes take and hold.
    """

    peak: PeakMemory | None = None
    profiled: Watching | None = None

    @property
    def meter(self) -> ActivationMeter | None:
        """What counts tensors."""
        if self.profiled is not None:
            return self.profiled.meter
        return None if self.peak is None else self.peak.meter


class _Bound(NamedTuple):
    """What one pass leaves to another, of all that the model's modules know of the schedule.

    Args:
        store: the weight gradients that wait for W.
        recomputes: the forwards that wait for R; None without any R.
        offloads: what is away between O and L; None without any O.
    """

    store: WeightGradients
    recomputes: Recomputes | None
    offloads: Offloads | None

    def assert_empty(self) -> None:
        """Nothing is left when all passes are done."""
        for each in self:
            if each is not None:
                each.assert_empty()


class ScheduleFunction:
    """Carries out the planned schedule, once each call, with the arguments and results of stock's functions.

    Making one is collective over all ranks: it makes the pipeline's process groups. So is the first call under
    ``variable_seq_lengths``, which makes those for the messages' shapes.

    Args:
        planner: gives the program for a number of microbatches.
        running: entered round the forward of every stage.
        late_checks: what a script wants to know of results while a program runs, which waits for its end.
        messages: between this rank and its neighbours.
        stall_seconds: how long a call may stand still before the process ends with a line about it; 0 for ever.
        report_memory: measure and report every rank's peak in the first training call.
        observers: told of every action.
        watchers: told of every training call, of whose actions they may observe some.
        lengths: plans training iterations for their microbatches' lengths.
        copies: how fast those of O and L are where a CPU stands for the device, and whether they go both ways at once.
        profiler: told of every training call; None for none.

    Attributes:
        between: called before each training call looks for its program, on all ranks: the moment to change it.
    """

    def __init__(
        self,
        planner: Planner,
        running: Callable[[int], AbstractContextManager[None]],
        late_checks: LateChecks,
        messages: Messages,
        *,
        stall_seconds: float = 0.0,
        report_memory: bool = False,
        observers: Sequence[Observer] = (),
        watchers: Sequence[CallWatcher] = (),
        lengths: LengthsBeside | None = None,
        copies: CopySpeed | None = None,
        profiler: Profiler | None = None,
    ) -> None:
        self._planner, self._running, self._late_checks = planner, running, late_checks
        self._messages, self._observers, self._watchers = messages, observers, watchers
        self.profiler, self._lengths = profiler, lengths
        self.between: Callable[[], None] = _nothing
        self._group = parallel_state.get_pipeline_model_parallel_group()
        self._rank = dist.get_rank(self._group)
        self._relay = LossRelay(self._group, planner.last_stage_rank)
        self._measure_next, self._counted = report_memory, False
        self._store: WeightGradients | None = None
        self._recomputes: Recomputes | None = None
        self._copies = copies or CopySpeed()
        self._offloads: Offloads | None = None
        self.peak_activation_bytes = 0
        self._tracker = _watched(stall_seconds) if stall_seconds else PositionTracker()

    def __call__(
        self,
        *,
        forward_step_func: Any,
        data_iterator: Any,
        model: Any,
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        decoder_seq_length: int | None = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        first_val_step: bool | None = None,
        adjust_tensor_shapes_fn: Any = None,
        p2p_communicator: Any = None,
        pg_collection: Any = None,
        force_all_reduce: bool | None = False,
    ) -> list[Any]:
        """One step (or one evaluation step). Arguments as stock's schedule functions; ``p2p_communicator`` is not used.

        Takes the program, begins what is measured, tells the model's modules where to keep what later passes need, runs
        all passes, hands the losses to the last rank, and finishes gradients and measurements.

        Returns:
            The losses of all microbatches on the last pipeline rank, an empty list on the others, as stock does.

        Raises:
            ValueError: for what only stock's own schedules can do.
        """
        if collect_non_loss_data or adjust_tensor_shapes_fn is not None:
            raise ValueError(
                "collecting outputs other than losses, and adjusted message shapes, need Megatron's own schedule"
            )
        chunks: Sequence[torch.nn.Module] = model if isinstance(model, list) else [model]
        iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        config = get_model_config(chunks[0])
        if config.timers is not None:
            config.timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)

        sizes = Sizes(num_microbatches, seq_length, micro_batch_size)
        sent = sizes._replace(sequence=decoder_seq_length or seq_length)
        cp_size = parallel_state.get_context_parallel_world_size()
        call = ScheduleCall(
            forward_step_func, iterators, num_microbatches, forward_only, collect_non_loss_data, first_val_step, cp_size
        )
        planned = None if forward_only else self._begun_training(iterators, sizes)
        program = planned and planned.program
        program = program or self._planner.program(num_microbatches, self._rank, forward_only=forward_only)
        measuring = self._begun_measuring(program, chunks, forward_only=forward_only)
        bound = self._bound(program, chunks, measuring.meter)
        spec = _message_spec(config, sent, cp_size)
        stages = MegatronStages(
            program,
            chunks,
            config,
            call,
            bound.store,
            self._running,
            measuring.meter,
            self._exchange(spec, sent, cp_size),
            bound.recomputes,
            bound.offloads,
        )
        transport = self._messages.transport(spec, variable_lengths=config.variable_seq_lengths)
        with self._tracker.running():
            observers = self._watching(measuring.profiled, bound.offloads)
            with closing(stages), events_in(config.timers), self._late_checks.at_the_end():
                self._run(program, stages, transport, observers, () if forward_only else self._watchers, planned)
            bound.assert_empty()
            losses, tokens = self._on_last_rank(stages, config, forward_only=forward_only)
            if not forward_only:
                self._finish_gradients(chunks, config, tokens, pg_collection, force_all_reduce)
            self._end_measuring(measuring)
            if config.timers is not None:
                config.timers("forward-backward").stop()
        if planned is not None:
            losses = in_loaders_order(losses, planned.order)
        return losses if self._rank == self._group.size() - 1 else []

    def count_next_call(self) -> None:
        """Count tensor by tensor, and report, what the next training call holds: :attr:`peak_activation_bytes`."""
        self._measure_next = self._counted = True

    @property
    def host_bytes(self) -> int:
        """Host memory that activations have been copied to, of this rank."""
        return 0 if self._offloads is None else self._offloads.host_bytes

    def _begun_training(self, iterators: Sequence[Any], sizes: Sizes) -> Planned | None:
        """A training call begins; how it is planned for its microbatches' lengths, None where it is not."""
        self.between()
        return None if self._lengths is None else self._lengths.begin(iterators, sizes)

    def _begun_measuring(
        self, program: Program, chunks: Sequence[torch.nn.Module], *, forward_only: bool
    ) -> _Measuring:
        """What is measured in this call."""
        if forward_only:
            return _Measuring()
        peak = None
        if self._measure_next:
            peak = PeakMemory((each for chunk in chunks for each in chunk.parameters()), counted=self._counted)
        meter = None if peak is None else peak.meter
        return _Measuring(peak, None if self.profiler is None else self.profiler.begin(program, chunks, meter))

    def _end_measuring(self, measuring: _Measuring) -> None:
        if measuring.meter is not None:
            self._store = None  # the next one counts nothing
        if measuring.peak is not None:
            self._report(measuring.peak)
        if measuring.profiled is not None and self.profiler is not None:
            self.profiler.end()

    def _bound(self, program: Program, chunks: Sequence[torch.nn.Module], meter: ActivationMeter | None) -> _Bound:
        """What keeps things for later passes, known to the model's modules."""
        offloads = self._begun_offloads(chunks, program, meter)
        store = self._bound_store(chunks, meter)
        return _Bound(store, self._bound_recompute(chunks, program) if program.has_recompute else None, offloads)

    def _exchange(self, spec: MessageSpec, sizes: Sizes, cp_size: int) -> Exchange | None:
        """Where all ranks share the vocabulary, what they exchange."""
        if self._messages.collective_group is None:
            return None
        words = sizes.rows, sizes.sequence // cp_size
        return Exchange(self._messages.collective_group, spec.shape, words, spec.dtype, spec.device)

    def _run(
        self,
        program: Program,
        stages: MegatronStages,
        transport: Transport,
        observers: Sequence[Observer],
        watchers: Sequence[CallWatcher],
        planned: Planned | None,
    ) -> None:
        """All passes and messages, which ``watchers`` hear of."""
        own_plan = planned and planned.timeline
        watching = [observer for watcher in watchers for observer in watcher.begin(program, own_plan)]
        run(program, stages, transport, [*observers, *watching], self._tracker)
        for watcher in watchers:
            watcher.end()
        stages.finish()

    def _on_last_rank(
        self, stages: MegatronStages, config: Any, *, forward_only: bool
    ) -> tuple[list[Any], torch.Tensor]:
        """Losses and tokens where stock has them, wherever the last stage is."""
        if self._planner.last_stage_rank == self._group.size() - 1:
            return stages.losses, stages.tokens
        losses, tokens = self._relay(stages.losses, stages.tokens)
        if config.mtp_num_layers and not forward_only:
            mtp.hand_over_metrics(self._group, self._planner.last_stage_rank, config.mtp_num_layers)
        return losses, tokens

    def _watching(self, profiled: Watching | None, offloads: Offloads | None) -> list[Observer]:
        """Who is told of this call's actions; and of its copies."""
        if offloads is not None:
            offloads.copies.watch = None if profiled is None else profiled.copies
        return [*self._observers, *(() if profiled is None else profiled.observers)]

    def _begun_offloads(
        self, chunks: Sequence[torch.nn.Module], program: Program, meter: ActivationMeter | None
    ) -> Offloads | None:
        """What takes activations to the host and back, which the model's layers know; None without any O."""
        if not program.has_offload:
            return None
        if self._offloads is None:
            self._offloads = begin(
                chunks, program.placement.stages_of(self._rank), self._planner.layers_away, self._copies
            )
            self._store = None
        self._offloads.meter = meter
        return self._offloads

    def _bound_store(self, chunks: Sequence[torch.nn.Module], meter: ActivationMeter | None) -> WeightGradients:
        """The queue of weight gradients, which the model's linears know; one for all calls but those measured."""
        if self._store is None or meter is not None:
            self._store = WeightGradients(meter, hooked=self._offloads is not None)
            for chunk in chunks:
                split_linears(chunk, self._store)
                split_te_linears(chunk, self._store)
        return self._store

    def _bound_recompute(self, chunks: Sequence[torch.nn.Module], program: Program) -> Recomputes:
        """The forwards that wait for their R, which the model's layers know from the first program on that has one."""
        if self._recomputes is None:
            self._recomputes = Recomputes(capture_state)
            which = self._planner.recomputed_layers
            for chunk, stage in zip(chunks, program.placement.stages_of(program.rank), strict=True):
                recompute_layers(chunk, None if which is None else which[stage], self._recomputes)
        return self._recomputes

    def _finish_gradients(
        self, chunks: Sequence[torch.nn.Module], config: Any, tokens: torch.Tensor, pg_collection: Any, force: Any
    ) -> None:
        if config.finalize_model_grads_func is None:
            return
        config.finalize_model_grads_func(
            list(chunks),
            tokens if config.calculate_per_token_loss else None,
            pg_collection=pg_collection,
            force_all_reduce=force,
        )
        tied.sum_gradients(chunks)

    def _report(self, measured: PeakMemory) -> None:
        self._measure_next, self.peak_activation_bytes = False, measured.bytes
        peaks: list[Any] = [None] * self._group.size()
        dist.all_gather_object(peaks, measured.bytes, group=self._group)
        each = ", ".join(f"rank {rank} {peak / 2**20:.2f} MiB" for rank, peak in enumerate(peaks))
        print_rank_last(f"pipeline schedule: peak activation memory measured: {each}; worst {max(peaks)} bytes")


def _nothing() -> None:
    """Nothing happens between two iterations."""


def _watched(stall_seconds: float) -> PositionTracker:
    """Returns a tracker; this process ends where it stalls for so long."""
    tracker = PositionTracker(_mark)
    StallWatch(
        tracker,
        stall_seconds,
        global_rank=dist.get_rank(),
        advice=f"docs/gpu.md lists causes; where it is only slow, raise {FLAGS['stall_seconds']} ({stall_seconds:g})",
        in_thread=partial(torch.cuda.set_device, torch.cuda.current_device()),
    ).start()
    return tracker


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record()
    return event


def _message_spec(config: Any, sizes: Sizes, cp_size: int) -> MessageSpec:
    """Every message is one microbatch's hidden states, as stock's are; variable lengths change the first two sizes."""
    length = sizes.sequence // cp_size
    if config.sequence_parallel:
        length //= parallel_state.get_tensor_model_parallel_world_size()
    device = torch.empty(0, device="cuda").device
    return MessageSpec((length, sizes.rows, config.hidden_size), config.pipeline_dtype, device)
