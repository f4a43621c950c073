"""A job that trains, and its replanning after it has measured itself, and when a rank or a link has become slow."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist
from megatron.core import parallel_state

from megatron.schedules.integration.flags.arguments import RunFlags
from megatron.schedules.integration.log.rank_lines import print_rank_0, print_rank_last
from megatron.schedules.integration.log.run_log import Logged, RunLog, reduced
from megatron.schedules.integration.profiling import Profiler
from megatron.schedules.integration.rank_device import bytes_left
from megatron.schedules.integration.schedule_function import ScheduleFunction
from megatron.schedules.job.measuring import MeasuredIterations
from megatron.schedules.job.values import MemoryLimit
from megatron.schedules.measure.iteration_summary import iteration_of
from megatron.schedules.measure.job_profile import JobProfile
from megatron.schedules.measure.slow_ranks import IdleWatch, SlowWatch, slow_links
from megatron.schedules.planner.adaptive import least_limit
from megatron.schedules.planner.replanning import with_room_for
from megatron.schedules.planner.request import Request, of_1f1b
from megatron.schedules.runtime.control_messages import ControlMessages
from megatron.schedules.runtime.planner import Planner
from megatron.schedules.runtime.replanner import Replanner
from megatron.schedules.schedule.simulator import simulate
from megatron.schedules.utils.printable import amount

# Iterations between the decision to measure and the first measured one; number of timed iterations.
_AFTER, _TIMED = 2, 5
# Iterations between the last timed one and the first that can run in a new order.
UNTIL_NEW = 3


class JobReplan:
    """Measures, replans and switches between training iterations, in the same way on all ranks.

    Args:
        planner: planner of the job.
        function: schedule function. Its profiler measures; it gets one if it has none.
        slow: finds slow ranks in the log.
        profiler: makes a profiler.
        iteration: returns the current iteration, as stock logs it.
        measured: measurement that the job makes in any case; None for none.
        flags: iterations already done, and the last of this run.
        limit: memory limit that the user gave (possibly one that the job measures); None without one.
        adopts: whether to switch to a better plan, or only to say what it would gain.
    """

    def __init__(
        self,
        planner: Planner,
        function: ScheduleFunction,
        slow: SlowWatch,
        profiler: Callable[[MeasuredIterations], Profiler],
        iteration: Callable[[], int],
        *,
        measured: MeasuredIterations | None,
        flags: RunFlags,
        limit: MemoryLimit | None,
        adopts: bool,
    ) -> None:
        store = dist.PrefixStore("megatron-schedules", dist.distributed_c10d._get_default_store())
        self._planner, self._function, self._profiler, self._iteration = planner, function, profiler, iteration
        self._replanner = Replanner(
            planner, ControlMessages(store, "replan"), first=dist.get_rank() == 0, adopts=adopts, say=_say
        )
        self._profile: JobProfile | None = None
        self._request: Request | None = None
        self._slow, self._idle, self._end = slow, IdleWatch(), flags.end
        self._measure = first_measurement(measured, flags.begun) is not measured
        self._file = None if measured is None else measured.file
        self._has_limit, self._measures_limit = limit is not None, limit is not None and limit.is_measured

    def boundary(self) -> None:
        """Switches plans or starts a measurement, before a training call looks up its program."""
        now, planned = self._planner.request.microbatches, self._request
        if self._replanner.under_way and planned is not None and planned.microbatches != now:
            self._start(replace(planned, microbatches=now))  # a plan for the old number of microbatches is useless
        self._replanner.boundary()
        last = self._iteration() == self._end
        if last and (self._profile is None or self._replanner.under_way):
            _say("the job ends with this iteration, before it has planned again")
        if last or self._replanner.under_way:
            return
        profiler = self._function.profiler
        if profiler is not None and profiler.profile is not None and profiler.profile is not self._profile:
            self._begin(profiler.profile)
        elif self._measure:
            self._measure = False
            self._function.profiler = self._profiler(_to_measure(self._iteration(), self._file))

    def logged(self, iteration: Logged) -> None:
        """Handles a logged iteration, on all ranks. If a rank or a link has become slow, the job measures again."""
        if self._profile is None or self._replanner.under_way:
            return
        idle = self._idle.add(iteration.measured.bubble)
        if idle and not iteration.slow:
            print_rank_last(
                "pipeline schedule: WARNING: the pipeline idles more than it did, "
                f"{100 * iteration.measured.bubble:.1f} % of its time, and no rank computes more slowly: messages are "
                "profiled anew"
            )
        self._measure = self._measure or bool(iteration.slow) or idle

    def _begin(self, profile: JobProfile) -> None:
        before, self._profile = self._profile, profile
        costs = profile.costs_like(self._planner.costs)
        decisions = replace(self._planner.decisions, layers=profile.layers)
        request = replace(self._planner.request, costs=costs, decisions=decisions)
        if before is not None:
            for source, to, time, earlier in slow_links(before.latencies, profile.latencies, _usual_pass(profile)):
                _say(
                    f"WARNING: messages from pipeline rank {source} to {to} take {time:.2f} ms, and took "
                    f"{earlier:.2f} ms when they were profiled first"
                )
        if self._measures_limit:
            self._measures_limit = False
            request = replace(request, memory_limit=self._limit(request, profile))
        running = simulate(self._planner.running, request.costs_on(self._planner.placement))
        self._slow.expect(iteration_of(running).stages)
        self._idle.expect()
        self._start(request if self._has_limit else with_room_for(running, request))

    def _start(self, request: Request) -> None:
        self._request = request
        self._replanner.start(request)

    def _limit(self, request: Request, profile: JobProfile) -> float:
        """Memory limit for the devices' free memory, as a fraction of 1F1B's: the smallest of all ranks."""
        rank = parallel_state.get_pipeline_model_parallel_rank()
        assert request.costs.in_bytes is not None, "the job has a model"
        microbatch_bytes = request.costs.in_bytes.of_rank(request.ranks)
        peak = simulate(self._planner.running, request.costs_on(self._planner.placement)).peaks[rank]
        left = bytes_left(peak * microbatch_bytes)
        own = of_1f1b(peak * microbatch_bytes + left, request.ranks, microbatch_bytes)
        exact, tightest = reduced([own, left], dist.ReduceOp.MIN)
        rounded = math.floor(1e3 * exact) / 1e3  # down, so that the printed limit is the exact one
        limit = min(max(rounded, least_limit(request)), request.microbatches / request.ranks)
        _say(
            f"memory limit: {limit:.3g} of 1F1B's, for {amount(tightest)} left on the tightest rank and "
            f"{amount(microbatch_bytes)} a microbatch"
        )
        return limit


class RunningJob(NamedTuple):
    """Job that trains.

    Args:
        function: runs each iteration.
        log: describes each logged iteration.
        replan: replans; None in a job that does not replan.
    """

    function: ScheduleFunction
    log: RunLog
    replan: JobReplan | None = None


def _say(line: str) -> None:
    print_rank_0(f"pipeline schedule: {line}")


def first_measurement(measured: MeasuredIterations | None, begun: int) -> MeasuredIterations:
    """First measurement for replanning: ``measured``, which the job makes in any case, if it has not passed yet."""
    if measured is not None and measured.counted > begun:
        return measured
    return _to_measure(begun + 1, None if measured is None else measured.file)


def _to_measure(iteration: int, file: Path | None) -> MeasuredIterations:
    """Measurement for a decision made before ``iteration``, written to ``file``."""
    return MeasuredIterations(iteration + _AFTER, iteration + _AFTER + _TIMED, file)


def _usual_pass(profile: JobProfile) -> float:
    """Average time of a pass, milliseconds."""
    times: Sequence[float] = [passes.median for stage in profile.stages for passes in stage.times.values()]
    return sum(times) / len(times)
