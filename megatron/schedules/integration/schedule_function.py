"""Schedule function, which stock's training loop calls in place of its own forward-backward functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_model_config

from megatron.schedules.estimate.build_flags import residual_streams
from megatron.schedules.integration.background_plans import (
    BackgroundPlans,
    IterationPlan,
    IterationSizes,
    in_loaders_order,
)
from megatron.schedules.integration.cpu import standin
from megatron.schedules.integration.expert_messages import ExpertMessages
from megatron.schedules.integration.flags.declared import FLAGS
from megatron.schedules.integration.graphs.capture import Capture
from megatron.schedules.integration.host_waits import LateChecks, events_in, host_waits, without_idle_timers
from megatron.schedules.integration.layers import tied
from megatron.schedules.integration.layers.losses import ResultRelay, hand_over_metrics
from megatron.schedules.integration.log import run_log
from megatron.schedules.integration.log.rank_lines import print_rank_last
from megatron.schedules.integration.log.run_log import RunLog
from megatron.schedules.integration.messages import Messages
from megatron.schedules.integration.model_binding import ModelBinding
from megatron.schedules.integration.model_stages import MegatronStages
from megatron.schedules.integration.profiling import Profiler, Watching
from megatron.schedules.integration.rank_device import PeakReport
from megatron.schedules.integration.schedule_call import ScheduleCall, check_groups
from megatron.schedules.integration.stage_inputs import StageInputs
from megatron.schedules.integration.verification import Verification
from megatron.schedules.integration.vocabulary.shared import Exchange
from megatron.schedules.programs.program import Program
from megatron.schedules.runtime.behind_messages import MessageBudget
from megatron.schedules.runtime.engine import Observer, run
from megatron.schedules.runtime.planner import Planner
from megatron.schedules.runtime.position import PositionTracker
from megatron.schedules.runtime.stall_watch import StallWatch
from megatron.schedules.runtime.transport import MessageSpec
from megatron.schedules.runtime.weight_gradients import WeightGradients
from megatron.schedules.schedule.simulator import Timeline

# The script for GPT that this package has.
_SCRIPT = "megatron.schedules.integration.gpt"


class ScheduleFunction:
    """Runs the planned schedule once per call, with the arguments and results of stock's functions.

    Creation is collective over all ranks, because it makes the pipeline's process groups. The first call under
    ``variable_seq_lengths`` is collective too: it makes groups for the messages' shapes.

    Args:
        planner: gives the program for a number of microbatches.
        running: context manager around the forward of every stage.
        late_checks: result checks that are delayed until the program has ended.
        messages: channels between this rank and its neighbours.
        log: records training calls.
        stall_seconds: if no pass finishes for this long, the process stops with one log line; 0 for no limit.
        report_memory: measure and report every rank's peak memory in the first training call.
        observers: notified of every action.
        lengths: plans training iterations for the lengths of their microbatches.
        profiler: notified of every training call; None for none.
        hiding: messages of experts that weight gradients hide; None for none.
        masks_documents: whether masks depend on data; see :class:`.StageInputs`.
        verify: whether the first training call is verified, after which the process ends.

    Attributes:
        between: called on all ranks before each training call looks up its program. The program may be changed here.
        model: this rank's model, as programs need it.
        peaks: peak activation memory of measured training calls.
    """

    def __init__(
        self,
        planner: Planner,
        running: Callable[[int], AbstractContextManager[None]],
        late_checks: LateChecks,
        messages: Messages,
        log: RunLog,
        *,
        stall_seconds: float = 0.0,
        report_memory: bool = False,
        observers: Sequence[Observer] = (),
        lengths: BackgroundPlans | None = None,
        profiler: Profiler | None = None,
        hiding: ExpertMessages | None = None,
        masks_documents: bool = False,
        verify: bool = False,
    ) -> None:
        self._planner, self._running, self._late_checks = planner, running, late_checks
        self._messages, self._observers, self._log = messages, observers, log
        self.profiler, self._lengths, self._hiding = profiler, lengths, hiding
        self.between: Callable[[], None] = lambda: None
        self._group = parallel_state.get_pipeline_model_parallel_group()
        self._rank = dist.get_rank(self._group)
        own = planner.placement.stages_of(self._rank)
        self._inputs = StageInputs(own, self._group, masks_documents=masks_documents)
        # Results of training and of evaluations have forms of their own.
        self._relays = [ResultRelay(self._group, planner.last_stage_rank) for _ in range(2)]
        self.model = ModelBinding(planner, watches_all=verify)
        self._reported = False
        self._waits: Counter[str] | None = None if standin.enabled() else Counter()
        self.peaks = PeakReport(self._group, next_call=report_memory, say=print_rank_last)
        self._verify = Verification(planner, self.peaks, self.model) if verify else None
        self._tracker = _watched(stall_seconds) if stall_seconds else PositionTracker()
        self._captured: Program | None = None
        self._training = False

    @contextmanager
    def capturing(self, chunks: Sequence[torch.nn.Module], num_microbatches: int) -> Iterator[Capture]:
        """Prepares this rank's ``chunks`` for the capture of CUDA graphs, for calls with ``num_microbatches``."""
        program = self._planner.program(num_microbatches, self._rank, forward_only=False)
        capture = Capture(program, self._store, self.model.volatile)
        with self.model.lent(chunks, capture.store):
            yield capture
        self._captured = program

    def _store(self) -> WeightGradients | None:
        return self.model.running() if self._training else None

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
        """Runs one training step or evaluation step. Arguments are as in stock; ``p2p_communicator`` is only checked.

        Returns:
            The losses of all microbatches on the last pipeline rank and an empty list on the others, as in stock.

        Raises:
            ValueError: the call needs a feature that only stock's own schedules have.
        """
        if collect_non_loss_data or adjust_tensor_shapes_fn is not None:
            raise ValueError("outputs other than losses, and adjusted message shapes, need Megatron's own schedule")
        check_groups(self._group, p2p_communicator, pg_collection)
        chunks, iterators = listed(model), listed(data_iterator)
        sizes, cp_size = (
            IterationSizes(num_microbatches, seq_length, micro_batch_size),
            int(parallel_state.get_context_parallel_world_size()),
        )
        call = ScheduleCall(forward_step_func, iterators, num_microbatches, forward_only, first_val_step, cp_size)
        message = sizes._replace(sequence=decoder_seq_length or seq_length)
        planned: IterationPlan | None = None

        # A CUDA graph of the whole call: no event may be asked for, and no host may wait.
        captured = torch.cuda.is_current_stream_capturing()
        if captured and not forward_only:
            self._log.stop()

        def once(program: Program, iterators: Sequence[Any], silent: bool = captured) -> list[Any]:
            mine = call._replace(data_iterators=iterators)
            with self._tracker.running(marked=not captured):
                stages = self._run(chunks, mine, message, program, planned and planned.timeline, silent=silent)
                losses, tokens = self._on_last_rank(stages, chunks, forward_only=forward_only, captured=captured)
                if not forward_only:
                    self._finish(chunks, stages, tokens, pg_collection, force_all_reduce, silent=silent)
            return losses

        with _timed(get_model_config(chunks[0])):
            if not forward_only:
                self.between()
                planned = None if self._lengths is None else self._lengths.begin(iterators, sizes)
            own = planned and planned.program
            program = own or self._planner.program(num_microbatches, self._rank, forward_only=forward_only)
            if self._verify is not None and not forward_only:
                timeline = planned.timeline if planned else self._planner.timeline_of(num_microbatches)
                self._verify(once, chunks, iterators, program, timeline)
            losses = once(program, iterators)
        losses = losses if planned is None else in_loaders_order(losses, planned.order)
        return losses if self._rank == self._group.size() - 1 else []

    def _run(
        self,
        chunks: Sequence[torch.nn.Module],
        call: ScheduleCall,
        message: IterationSizes,
        program: Program,
        timeline: Timeline | None,
        *,
        silent: bool,
    ) -> MegatronStages:
        """Runs all passes and messages of one call. Training calls are measured and logged, but not if ``silent``.

        ``timeline`` is that of ``program``; None for the usual plan's.
        """
        config, self._training = get_model_config(chunks[0]), not call.forward_only
        training = self._training
        if training and self._captured is not None and self._captured is not program:
            raise RuntimeError("CUDA graphs were captured in the order of another plan: a job has one")
        if getattr(config, "moe_paged_stash", False):  # it notes the order of passes over experts, in any schedule
            schedules.paged_stash_reset(enabled=training, config=config)
        measuring = Watching(meter=self.peaks.begin(chunks)) if training else Watching()
        if training and self.profiler is not None and not silent:
            measuring = self.profiler.begin(program, chunks, measuring.meter)
        deferred = self.model.bind(chunks, program, measuring.meter)
        if deferred.offloads is not None:
            deferred.offloads.copies.watch = measuring.copies
        spec = _message_spec(config, message, call.cp_size)
        exchange = self._exchange(spec, message, call.cp_size, config.hidden_size)
        stages = MegatronStages(
            program,
            chunks,
            without_idle_timers(config),
            call,
            deferred,
            self._running,
            measuring.meter,
            exchange,
            None if self._hiding is None else MessageBudget(self._planner.timeline.costs),
        )
        transport = self._messages.transport(spec, variable_lengths=config.variable_seq_lengths)
        observers = [*self._observers, *measuring.observers]
        log = self._log if training and not silent else None
        hidden = nullcontext() if self._hiding is None else self._hiding.hidden(stages.run_ahead, measuring.messages)
        with closing(stages), events_in(config.timers), self._late_checks.at_the_end(), hidden:
            if log is not None:
                observers += log.begin(program, timeline)
            noted = host_waits(self._waits if log is not None and not self._reported else None)
            with self._inputs.compared(chunks), noted, deferred.store.keeping_graphs():
                run(program, stages, transport, observers, self._tracker)
            if log is not None:
                log.end()
            stages.finish()
        deferred.assert_empty()
        return stages

    def _finish(
        self,
        chunks: Sequence[torch.nn.Module],
        stages: MegatronStages,
        tokens: torch.Tensor,
        pg_collection: Any,
        force: Any,
        *,
        silent: bool,
    ) -> None:
        """Finishes the gradients and the measurements of a training call."""
        config = get_model_config(chunks[0])
        if config.finalize_model_grads_func is not None:
            counted = tokens if config.calculate_per_token_loss else None
            config.finalize_model_grads_func(list(chunks), counted, pg_collection=pg_collection, force_all_reduce=force)
            tied.sum_gradients(chunks, shares_vocabulary=self._planner.shares_vocabulary)
        self.peaks.end()
        if not self._reported:
            self._reported = True
            peak = max(self.peaks.bytes, self._log.peak.bytes or 0)
            seen = run_log.seen(chunks, self.model.offloads, peak, self._waits, stages.partial_gradients)
            run_log.report(self._planner, self._group, seen)
        if self.profiler is not None and not silent:
            self.profiler.end()

    def _exchange(self, spec: MessageSpec, sizes: IterationSizes, cp_size: int, width: int) -> Exchange | None:
        """Collectives of vocabulary parallelism; None without it."""
        if self._messages.collective_group is None:
            return None
        words = sizes.rows, sizes.sequence // cp_size
        hidden = (*spec.shape[:-1], width)  # one residual stream: what the embedding makes, and the output layer reads
        return Exchange(self._messages.collective_group, hidden, words, spec.dtype, spec.device)

    def _on_last_rank(
        self, stages: MegatronStages, chunks: Sequence[torch.nn.Module], *, forward_only: bool, captured: bool
    ) -> tuple[list[Any], torch.Tensor]:
        """Returns losses and tokens on the last rank, as in stock, for any position of the last stage."""
        config = get_model_config(chunks[0])
        if self._planner.last_stage_rank == self._group.size() - 1:
            return stages.losses, stages.tokens
        results, relay = (stages.losses, stages.tokens), self._relays[forward_only]
        losses, tokens = relay(results, stages.tokens.device, alike=captured)
        if config.mtp_num_layers and not forward_only:
            hand_over_metrics(self._group, self._planner.last_stage_rank, config.mtp_num_layers)
        return losses, tokens


def listed(value: Any) -> list[Any]:
    """Returns a list with one value per chunk; stock passes a single chunk's value without a list."""
    return value if isinstance(value, list) else [value]


@contextmanager
def _timed(config: Any) -> Iterator[None]:
    """Runs stock's timer of a whole step."""
    if config.timers is not None:
        config.timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
    yield
    if config.timers is not None:
        config.timers("forward-backward").stop()


def _watched(stall_seconds: float) -> PositionTracker:
    """Returns a tracker that ends this process if no pass finishes for ``stall_seconds``."""
    tracker = PositionTracker(_mark)
    StallWatch(
        tracker,
        stall_seconds,
        global_rank=dist.get_rank(),
        advice=f"docs/gpu.md lists causes; where it is only slow, raise {FLAGS['stall_seconds']} ({stall_seconds:g})",
        scripts=(_SCRIPT,),
        in_thread=partial(torch.cuda.set_device, torch.cuda.current_device()),
    ).start()
    return tracker


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record()
    return event


def _message_spec(config: Any, sizes: IterationSizes, cp_size: int) -> MessageSpec:
    """Shape of every message: one microbatch's hidden states, in all residual streams that go from layer to layer.

    Under ``variable_seq_lengths`` each message has its own shape, with as many dimensions.
    """
    length = sizes.sequence // cp_size
    if config.sequence_parallel:
        length //= parallel_state.get_tensor_model_parallel_world_size()
    device = torch.empty(0, device="cuda").device
    width = residual_streams(config) * config.hidden_size
    return MessageSpec((length, sizes.rows, width), config.pipeline_dtype, device)
