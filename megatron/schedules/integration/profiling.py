"""Measurements of a job by itself: times and bytes of its passes, gathered from all ranks into one profile."""

from __future__ import annotations

import os
import platform
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.package_info import __shortversion__

from megatron.schedules.integration.cpu import standin
from megatron.schedules.integration.expert_messages import EXPOSED, MessageWatch
from megatron.schedules.integration.flags.declared import FLAGS
from megatron.schedules.integration.log.rank_lines import print_rank_0
from megatron.schedules.job.measuring import MeasuredIterations
from megatron.schedules.measure.clocks import aligned, gaps, latencies
from megatron.schedules.measure.job_profile import JobProfile
from megatron.schedules.measure.job_profile_json import to_text
from megatron.schedules.measure.measured_passes import (
    Conditions,
    Timed,
    profile_of,
    rank_measured,
)
from megatron.schedules.measure.profile_facts import Facts
from megatron.schedules.measure.recorded_run import Recorded
from megatron.schedules.programs.program import Program
from megatron.schedules.report.drawing import saved_timeline
from megatron.schedules.report.profile_table import as_text
from megatron.schedules.runtime.activation_meter import ActivationMeter
from megatron.schedules.runtime.control_messages import of_all_ranks
from megatron.schedules.runtime.copies import CopyWatch
from megatron.schedules.runtime.engine import Observer
from megatron.schedules.runtime.planner import Planner
from megatron.schedules.runtime.recorder import ByteCounter, MessageTimes, Recorder, Span, StreamClock
from megatron.schedules.schedule.kinds import KINDS, Pass, Resource
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.simulator import Copy, Timeline, held_over_time, simulate
from megatron.schedules.utils.errors import one_line
from megatron.schedules.utils.output_files import write_text

# Latencies are medians over a few iterations. All ranks of a pipeline exchange the passes, so both are limited.
_MOST_ITERATIONS, _MOST_PASSES = 4, 200_000


class Watching(NamedTuple):
    """Observers of a training call that is measured.

    Args:
        observers: notified of every action.
        copies: notified of the copies of O and L.
        meter: counts activations tensor by tensor; may be None.
        messages: measures messages of experts; may be None.
    """

    observers: Sequence[Observer] = ()
    copies: CopyWatch | None = None
    meter: ActivationMeter | None = None
    messages: MessageWatch | None = None


@dataclass(frozen=True)
class _Iteration:
    """One timed iteration of one rank, on that rank's clock.

    Args:
        number, schedule: iteration and what ran.
        passes, copies, messages: their times.
        exposes: whether no weight gradients ran behind messages.
    """

    number: int
    schedule: Schedule
    passes: list[Timed]
    copies: list[Timed]
    messages: list[MessageTimes]
    exposes: bool


class Profiler:
    """Measures the training calls of iterations A to B and gathers the measurements at the end of B.

    If B is skipped (``--iterations-to-skip``), it gathers them before the next iteration.

    Bytes are counted in A, times are measured in the iterations after it. So that each pass is measured with its own
    work alone, no weight gradients run behind messages of experts before B, nor in B if no other iteration is timed.

    Args:
        planner: planner of the job.
        model: sizes of the model.
        iteration: returns the current iteration, as stock logs it.
        measured: the iterations, and the output paths.

    Attributes:
        profile: profile of the whole job, the same on all ranks; None until iteration B has ended.
        recorded: iteration B of this rank's pipeline, on one clock; None until then.
    """

    def __init__(
        self, planner: Planner, model: Facts, iteration: Callable[[], int], measured: MeasuredIterations
    ) -> None:
        self.profile: JobProfile | None = None
        self.recorded: Recorded | None = None
        self._planner, self._model, self._iteration, self._measured = planner, model, iteration, measured
        self._recorder = Recorder(StreamClock())
        self._numbers: list[tuple[int, Schedule, bool]] = []
        self._bytes: ByteCounter | None = None
        self._late = False

    def begin(self, program: Program, chunks: Sequence[torch.nn.Module], meter: ActivationMeter | None) -> Watching:
        """Begins a training call. ``meter`` may already count in it."""
        number, (first, last) = self._iteration(), self._measured.timed
        if number > last and self._numbers:  # the last one was skipped
            self._gather()
        self._say_if_missed(number)
        if number == self._measured.counted:
            if standin.enabled() and meter is None:
                meter = ActivationMeter(parameter for chunk in chunks for parameter in chunk.parameters())
            self._bytes = ByteCounter(torch.cuda.memory_allocated if meter is None else lambda: meter.current)
            return Watching([self._bytes], meter=meter, messages=EXPOSED)
        if self._bytes is None or not first <= number <= last or self.profile is not None:
            return Watching(meter=meter)
        exposes = number < last or first == last
        self._numbers.append((number, self._planner.schedule(program.microbatches), exposes))
        self._recorder.begin()
        return Watching([self._recorder], self._recorder, meter, MessageWatch(self._recorder.message, exposes))

    def end(self) -> None:
        """Ends a training call. After the last timed call, gathers the measurements of all ranks.

        Only then, once in a job, the host waits for the device. No program runs at that time, and the device already
        has all the work that other ranks wait for.
        """
        number, (first, last) = self._iteration(), self._measured.timed
        if self._bytes is None or not first <= number <= last or self.profile is not None:
            return
        self._recorder.end()
        if number == last:
            self._gather()

    def _say_if_missed(self, number: int) -> None:
        """Logs once that the measured iterations are over, or skipped, and nothing was measured."""
        counted, last = self._measured.counted, self._measured.last
        missed = f"begins with {counted}" if self._bytes is None else f"ends with {last}"
        if self._late or self.profile is not None or number <= (counted if self._bytes is None else last):
            return
        self._late = True
        print_rank_0(
            f"pipeline schedule: nothing is profiled: the job is at iteration {number} already, and "
            f"{FLAGS['measure']} {missed}"
        )

    def _taken(self) -> list[_Iteration]:
        iterations = []
        for number, schedule, exposes in self._numbers:
            spans = self._recorder.take()
            assert spans is not None, "the device is idle"
            passes = [_placed(span) for span in spans]
            messages = self._recorder.messages
            iterations.append(_Iteration(number, schedule, passes, [*self._recorder.copies], messages, exposes))
        self._numbers = []
        return iterations

    def _gather(self) -> None:
        assert self._bytes is not None
        torch.cuda.synchronize()
        iterations, changes = self._taken(), self._bytes.changes
        group = parallel_state.get_pipeline_model_parallel_group()
        timed = [iteration for iteration in iterations if iteration.exposes or not iteration.messages]
        without = [replace(iteration, messages=[]) for iteration in iterations]  # for fewer bytes
        passes = sum(map(len, iterations[-1].schedule.order))
        exposed = sum(message.exposed for message in iterations[-1].messages)
        most = max(1, min(_MOST_ITERATIONS, _MOST_PASSES // passes))
        told = of_all_ranks((without[-most:], changes), group)
        measured = rank_measured(
            dist.get_rank(group),
            [timed_pass for iteration in timed for timed_pass in iteration.passes],
            [copy for iteration in iterations for copy in iteration.copies],
            changes,
            latencies([gaps(every[0].schedule, *_times(every)) for every in zip(*(of for of, _ in told), strict=True)]),
            waits=[wait for iteration in timed for wait in _waits(iteration.messages)],
            exposed=exposed if len(timed) < len(iterations) else None,
        )
        costs, decisions, schedule = self._planner.costs, self._planner.decisions, iterations[-1].schedule
        under = Conditions(self._model._replace(device=_device()), schedule, costs, decisions, self._measured.timed)
        self.profile = profile_of(of_all_ranks(measured), under)
        self.recorded = _recorded([of[-1] for of, _ in told], [dict(rank) for _, rank in told], self.profile, under)
        print_rank_0(as_text(self.profile, self.recorded))
        if self._measured.file is not None and dist.get_rank() == 0:
            self._save(self.profile)
        if self._measured.timeline is not None and dist.get_rank() == 0:
            print_rank_0(saved_timeline(self.recorded, self._measured.timeline))

    def _save(self, profile: JobProfile) -> None:
        file = self._measured.file
        assert file is not None
        versions = {"torch": str(torch.__version__), "megatron-core": __shortversion__}
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_text(file, to_text(profile, versions=versions, date=date.today().isoformat()))
        except OSError as error:  # a failed write must not lose hours of training
            said = f"the costs could not be written to {file}: {error.strerror}"
        else:
            said = f"costs written to {file}, for --pipeline-costs"
        print_rank_0(one_line(f"pipeline schedule: {said}"))


def _waits(messages: Iterable[MessageTimes]) -> Iterable[tuple[Pass, float]]:
    """Time that each pass of an iteration waits for its messages."""
    waits: dict[Pass, float] = defaultdict(float)
    for work, _, exposed in messages:
        waits[work] += exposed
    return waits.items()


def _placed(span: Span) -> Timed:
    """Returns a pass's times. For a copy both are the time at which computation continues, as in every timeline."""
    work, start, end = span
    return work, start if KINDS[work.kind].resource is Resource.COMPUTE else end, end


def _times(ranks: Sequence[_Iteration]) -> tuple[list[list[float]], list[list[float]]]:
    """Returns starts and ends of one iteration, by rank."""
    starts, ends = ([[timed_pass[at] for timed_pass in rank.passes] for rank in ranks] for at in (1, 2))
    return starts, ends  # type: ignore[return-value]


def _recorded(
    ranks: Sequence[_Iteration],
    changes: Sequence[dict[Any, float]],
    profile: JobProfile,
    under: Conditions,
) -> Recorded:
    """Returns one iteration of a pipeline on one clock."""
    schedule = ranks[0].schedule
    start, end, shifts = aligned(schedule, *_times(ranks))
    copies = tuple(
        tuple(Copy(work, begun + shift, over + shift) for work, begun, over in rank.copies)
        for rank, shift in zip(ranks, shifts, strict=True)
    )
    held = tuple(
        held_over_time([change.get(work, 0.0) for work in order], *times)
        for order, change, *times in zip(schedule.order, changes, start, end, strict=True)
    )
    return Recorded(
        Timeline(schedule, profile.stage_costs(under.costs, under.decisions), start, end, copies),
        simulate(schedule, under.costs.on(schedule.placement, under.decisions)),
        ranks[0].number,
        under.facts.device,
        held,
    )


def _device() -> str:
    if standin.enabled():
        return f"a CPU ({platform.machine()}, {os.cpu_count()} cores)"
    return torch.cuda.get_device_name()
