"""Figures of training iterations, measured on all ranks.

A report of a job's first iteration; bubble, peak memory and slowest stage of each one that stock logs, for its line and
writers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.utils import get_model_config

from megatron.schedules.integration.cpu import standin
from megatron.schedules.integration.linears import local, transformer_engine
from megatron.schedules.integration.linears.local import output_layers
from megatron.schedules.integration.log.rank_lines import print_rank_0
from megatron.schedules.integration.rank_device import PeakWatch
from megatron.schedules.measure.iteration_summary import (
    Iteration,
    RankTimes,
    iteration_of,
    measured_iteration,
    rank_times,
)
from megatron.schedules.measure.slow_ranks import Slow, SlowWatch
from megatron.schedules.programs.program import Program
from megatron.schedules.report.first_iteration import ExpectedFigures, Seen, lines
from megatron.schedules.runtime.control_messages import of_all_ranks
from megatron.schedules.runtime.engine import Observer
from megatron.schedules.runtime.offload import Offloads
from megatron.schedules.runtime.planner import Planner
from megatron.schedules.runtime.recorder import HostClock, Recorder, StreamClock
from megatron.schedules.schedule.simulator import Timeline
from megatron.schedules.utils.printable import amount

_GIB = 2**30


class Logged(NamedTuple):
    """One logged iteration.

    Args:
        measured: times of the stages, milliseconds.
        planned: times of the stages in the unit of the plan's costs.
        peak: activation memory of the worst rank, bytes; None if it was not counted.
        planned_peak: the same from the model's arithmetic; None if its sizes are unknown.
        slowest_rank: pipeline rank of the slowest stage.
        slow: ranks that have become slow.
        since: text that says when these ranks were faster.
    """

    measured: Iteration
    planned: Iteration
    peak: float | None
    planned_peak: float | None
    slowest_rank: int
    slow: Sequence[Slow] = ()
    since: str = ""

    def words(self) -> str:
        """Text added to stock's line."""
        measured, planned = self.measured, self.planned
        stage, beyond = measured.slowest
        held = [] if self.peak is None else [amount(self.peak)]
        held += [] if self.planned_peak is None else [f"planned {amount(self.planned_peak)}"]
        peak = f" peak activations: {', '.join(held)} |" if held else ""
        return (
            f" pipeline bubble: {100 * measured.bubble:.1f} % (planned {100 * planned.bubble:.1f} %) |{peak}"
            f" slowest stage: {stage} (rank {self.slowest_rank}, {_above(beyond)} over mean,"
            f" planned {_above(planned.stages[stage] * len(planned.stages) / sum(planned.stages) - 1)}) |"
        )

    def warnings(self) -> list[str]:
        """Warnings, one line for each rank that has become slow."""
        return [
            f"pipeline schedule: WARNING: pipeline rank {rank} takes {ratio:.2f} x as long for its passes as "
            f"{self.since}"
            for rank, ratio in self.slow
        ]

    def scalars(self) -> dict[str, float]:
        """Values for writers, by name; memory in GiB."""
        values = {
            "pipeline/bubble": self.measured.bubble,
            "pipeline/planned-bubble": self.planned.bubble,
            "pipeline/slowest-stage": float(self.measured.slowest.stage),
            "pipeline/slowest-stage-beyond-mean": self.measured.slowest.beyond_mean,
        }
        if self.peak is not None:
            values["pipeline/peak-activations-gib"] = self.peak / _GIB
        if self.planned_peak is not None:
            values["pipeline/planned-peak-activations-gib"] = self.planned_peak / _GIB
        return values


def _above(share: float) -> str:
    return f"{100 * share:+.0f} %"


class RunLog:
    """Records the iterations that stock will log, and describes them when it logs them.

    The log does not wait for the device: it describes the last iteration that the device has finished. Stock itself
    waits for the device before it logs, so that is the logged iteration.

    Args:
        planner: has the plan.
        iteration: returns the current iteration.
        interval: stock logs every this many iterations.

    Attributes:
        slow: finds ranks that have become slow.
        peak: this rank's peak activation memory in training calls so far.
    """

    def __init__(self, planner: Planner, iteration: Callable[[], int], interval: int) -> None:
        self._planner, self._iteration, self._interval = planner, iteration, interval
        self._recorder = Recorder(HostClock() if standin.enabled() else StreamClock())
        self.peak = PeakWatch()
        self.slow = SlowWatch(planner.placement.rank_of)
        self._calls, self._recording, self._within = 0, False, False
        self._blind = False
        self._microbatches = planner.first.microbatches
        self._planned: Timeline | None = None
        self._last: RankTimes | None = None

    def begin(self, program: Program, planned: Timeline | None) -> Sequence[Observer]:
        """Begins a training call; returns the observers of its actions. Without ``planned`` the usual plan is run."""
        # Stock logs at its interval, and a job's first iteration.
        self._blind, self._recording = False, not self._calls or self._iteration() % self._interval == 0
        self._calls += 1
        self._microbatches, self._planned = program.microbatches, planned
        self.peak.begin()
        if not self._recording:
            return ()
        self._recorder.begin()
        return (self._recorder,)

    def end(self) -> None:
        """Ends a training call, after the host has queued all its work."""
        if self._recording:
            self._recorder.end()
        self.peak.end()

    def stop(self) -> None:
        """Describes no iteration until a call begins again: a CUDA graph of a whole call runs without the engine."""
        self._blind = True

    @contextmanager
    def logging(self) -> Iterator[None]:
        """Marks that stock is making its line."""
        self._within = True
        try:
            yield
        finally:
            self._within = False

    def logged(self, counted: int) -> Logged | None:
        """Returns the iteration being logged; None outside of stock's log or without a record. Collective.

        Args:
            counted: activation bytes counted on this rank; 0 if not counted.
        """
        if not self._within or self._blind:
            return None
        placement = self._planner.placement
        while (spans := self._recorder.take()) is not None:
            self._last = rank_times(spans, placement.stages)
        peak = max(counted, self.peak.bytes or 0)
        last = self._last or RankTimes(0.0, 0.0, (0.0,) * placement.stages)
        until_last, worst, *stages = reduced([last.until_last, peak, *last.stages], dist.ReduceOp.MAX)
        busy, ranks = reduced([last.busy, float(self._last is not None)], dist.ReduceOp.SUM)
        if not ranks:
            return None
        timeline = self._planned or self._planner.timeline_of(self._microbatches)
        measured = measured_iteration(busy, round(ranks), until_last, stages)
        return Logged(
            measured,
            iteration_of(timeline),
            worst or None,
            self._planner.peak_bytes(timeline),
            placement.rank_of[measured.slowest.stage],
            self.slow.add(measured.stages),
            self.slow.since,
        )


def reduced(values: Sequence[float], how: Any) -> list[float]:
    """Reduces ``values`` over all ranks of the job in one small message."""
    tensor = torch.tensor(values, dtype=torch.float64, device="cuda")
    dist.all_reduce(tensor, how)
    return [float(value) for value in tensor.tolist()]


def seen(
    chunks: Sequence[torch.nn.Module],
    offloads: Offloads | None,
    peak: int,
    waits: Counter[str] | None,
    partial_gradients: Collection[int] = (),
) -> Seen:
    """Returns what this rank knows at the end of the first call, without waiting for its device.

    ``partial_gradients`` are the identities of :attr:`.ParameterLeaves.partial`.
    """
    linears, whole, partial = Counter[str](), Counter[tuple[str, str]](), list[str]()
    for chunk in chunks:
        partial += [name for name, parameter in chunk.named_parameters() if id(parameter) in partial_gradients]
        outputs = output_layers(chunk)
        for module in chunk.modules():
            if module in outputs:
                continue
            if isinstance(module, local.LINEARS):
                why = local.whole_because(module)
            elif isinstance(module, transformer_engine.linears()):
                why = transformer_engine.whole_because(module)
            elif isinstance(module, torch.nn.Linear) and module.weight.requires_grad:
                why = "not Megatron's or Transformer Engine's"
            else:
                continue
            if why is None:
                linears[type(module).__name__] += 1
            else:
                whole[type(module).__name__, why] += 1
    fused = bool(get_model_config(chunks[0]).gradient_accumulation_fusion)
    return Seen(linears, fused, {} if offloads is None else offloads.moved, peak, waits, whole, partial)


def report(planner: Planner, group: dist.ProcessGroup, mine: Seen) -> None:
    """Prints the report on the job's first rank. Collective over the pipeline; ranks wait for each other here, once."""
    ranks = of_all_ranks(mine, group)
    expected = ExpectedFigures(planner.first.splits, planner.offloaded_bytes, planner.peak_bytes(planner.timeline))
    print_rank_0("\n".join(f"pipeline schedule: first iteration: {line}" for line in lines(ranks, expected)))
