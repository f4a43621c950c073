"""Start of a job's training: creates the schedule function, the iteration log, and replanning."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import NamedTuple

from megatron.schedules.integration.background_plans import BackgroundPlans
from megatron.schedules.integration.expert_messages import ExpertMessages
from megatron.schedules.integration.flags.measuring import Measured, measured_iterations
from megatron.schedules.integration.flags.plan_lengths import attention_of
from megatron.schedules.integration.flags.planner import Planner
from megatron.schedules.integration.flags.replan_checks import replans_by_itself
from megatron.schedules.integration.flags.run_flags import RunFlags
from megatron.schedules.integration.flags.switched_off import switched_off
from megatron.schedules.integration.gpu_libraries import found
from megatron.schedules.integration.host_waits import LateChecks
from megatron.schedules.integration.job_replanning import UNTIL_NEW, JobReplan, first_measurement
from megatron.schedules.integration.log.rank_lines import print_rank_0
from megatron.schedules.integration.log.run_log import RunLog
from megatron.schedules.integration.messages import Messages
from megatron.schedules.integration.profiling import Profiler
from megatron.schedules.integration.schedule_function import ScheduleFunction
from megatron.schedules.job.spec import JobSpec
from megatron.schedules.planner.registry import AUTO
from megatron.schedules.runtime.ranges import ProfilerRanges


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


def begin(
    spec: JobSpec,
    planner: Planner,
    flags: RunFlags,
    iteration: Callable[[], int],
    running: Callable[[int], AbstractContextManager[None]],
    late_checks: LateChecks,
    expert_messages: ExpertMessages,
) -> RunningJob:
    """Begins the job. Collective over all ranks.

    Args:
        spec: the job.
        planner: its plans.
        flags: the Megatron flags that it reads.
        iteration: returns the current iteration, as stock logs it.
        running: context manager around the forward of every stage.
        late_checks: result checks that are delayed until a program has ended.
        expert_messages: messages that weight gradients may hide.
    """
    settings = spec.settings
    off = [f"pipeline schedule: {each}" for each in switched_off(spec, planner.first)]
    print_rank_0("\n".join([planner.summary(), found(), *off]))
    measured = measured_iterations(settings.measuring, flags.train_iters)
    profiler = partial(Profiler, planner, flags.model, iteration)
    log = RunLog(planner, iteration, flags.log_interval)
    function = ScheduleFunction(
        planner,
        running,
        late_checks,
        Messages(planner, flags.groups),
        stall_seconds=settings.stall_seconds,
        report_memory=measured is not None,
        observers=[ProfilerRanges()] if flags.profiles else (),
        log=log,
        lengths=BackgroundPlans(planner, attention_of(spec), flags.groups.timeout) if settings.plan_lengths else None,
        profiler=None if measured is None else profiler(measured),
        hiding=expert_messages if settings.hides_messages else None,
    )
    if not _replans(spec, planner, first_measurement(measured, flags.begun), flags.end):
        return RunningJob(function, log)
    replan = JobReplan(
        planner,
        function,
        log.slow,
        profiler,
        iteration,
        measured=measured,
        begun=flags.begun,
        end=flags.end,
        limit=settings.memory_limit,
    )
    function.between = replan.boundary
    return RunningJob(function, log, replan)


def _replans(spec: JobSpec, planner: Planner, first: Measured, end: int) -> bool:
    """Returns whether the job replans. Logs it if no flag requests it, or if a flag requests it but it is impossible.

    Args:
        spec: the job.
        planner: its plan.
        first: its first measurement.
        end: last iteration of this run.
    """
    by_flag, needed = spec.settings.replans, first.last + UNTIL_NEW
    if by_flag and needed > end:
        print_rank_0(
            f"pipeline schedule: the job does not plan again: it ends with iteration {end}, and a new order could run "
            f"from iteration {needed} on"
        )
    by_itself = not by_flag and needed <= end and replans_by_itself(spec, planner.request)
    if by_itself:
        print_rank_0(
            f"pipeline schedule: {AUTO} has no measured costs: it measures iterations {first.counted} to {first.last}, "
            "then plans again in the background"
        )
    return needed <= end and (by_flag or by_itself)
