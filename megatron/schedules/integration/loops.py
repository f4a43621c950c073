"""Schedule functions of a process: of Megatron-LM's job, or of each model that another training loop trains.

Such a loop has no arguments of Megatron-LM's. Its job is planned at the first call of the schedule function with a
model, which is collective over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig

from megatron.schedules.estimate.build_flags import WHOLE
from megatron.schedules.integration.background_plans import BackgroundPlans
from megatron.schedules.integration.flags.arguments import RunFlags, run_flags
from megatron.schedules.integration.flags.configuration import loop_job, written_layout
from megatron.schedules.integration.flags.declared import FLAGS
from megatron.schedules.integration.gpu_libraries import libraries_line
from megatron.schedules.integration.graphs.capture import Capture
from megatron.schedules.integration.job_replanning import UNTIL_NEW, JobReplan, RunningJob, first_measurement
from megatron.schedules.integration.layers import tied
from megatron.schedules.integration.layers.layout import PlacedLayout
from megatron.schedules.integration.log.rank_lines import print_rank_0
from megatron.schedules.integration.log.run_log import RunLog
from megatron.schedules.integration.log.spans import spans
from megatron.schedules.integration.messages import Messages
from megatron.schedules.integration.model_checks import refuse_unfit
from megatron.schedules.integration.profiling import Profiler
from megatron.schedules.integration.refuse import refuse
from megatron.schedules.integration.schedule_function import ScheduleFunction, listed
from megatron.schedules.integration.session import Session
from megatron.schedules.job.checks import RUN_AGAIN
from megatron.schedules.job.job_costs import attention_of
from megatron.schedules.job.measuring import MeasuredIterations, measured_iterations
from megatron.schedules.job.plan_job import JobPlan
from megatron.schedules.job.plan_summary import summary, switched_off
from megatron.schedules.job.spec import JobSpec, StockLayers
from megatron.schedules.job.stage_layers import layers_by_stage, letters_by_stage
from megatron.schedules.job.values import layers_choice, schedule_choice
from megatron.schedules.planner.registry import AUTO, follows_costs
from megatron.schedules.runtime.planner import Planner
from megatron.schedules.runtime.recorder import ProfilerRanges
from megatron.schedules.schedule.model_loads import even
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.printable import counted


def schedule_function(session: Session, call: Mapping[str, Any]) -> Callable[..., list[Any]] | None:
    """Returns the function that runs the call with these arguments; None if stock's own runs it."""
    if not session.has_schedule:
        return None
    if session.plan is not None and session.planner is not None:
        if session.job is None:
            refuse_unfit(listed(call["model"]), session.plan.spec.settings.schedule)
            session.job = _begun(session, session.plan, session.planner, run_flags(session.args), session.iteration)
        return session.job.function
    chunks = listed(call["model"])
    if call.get("collect_non_loss_data") and call.get("forward_only") and len(chunks) == 1:
        return None  # stock's own finds each layer where it expects it
    if chunks[0] not in session.loops:
        session.loops[chunks[0]] = LoopJob(session, chunks, call)
    return session.loops[chunks[0]]


def place_layers(session: Session, config: TransformerConfig) -> None:
    """Puts the layers of a model that a loop builds where the schedule has them, if stock has them elsewhere."""
    ranks, chunks = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size
    placement = session.placement(ranks, chunks)
    if placement is None or placement.looped or isinstance(config.pipeline_model_parallel_layout, PlacedLayout):
        return
    schedule, asked = session.settings["pipeline_schedule"], session.settings.get("pipeline_layers")
    layout = config.pipeline_model_parallel_layout
    stand_in = config.account_for_embedding_in_pipeline_split, config.account_for_loss_in_pipeline_split
    first, last = config.num_layers_in_first_pipeline_stage, config.num_layers_in_last_pipeline_stage
    ahead = config.mtp_num_layers or 0
    stock = StockLayers(
        config.num_layers, first, last, None if layout is None else written_layout(layout), stand_in, ahead
    )
    try:
        given = layers_choice(FLAGS["layers"], asked)
        # The pattern of a hybrid model, which it does not read from here, may have other stages.
        hybrid = getattr(config, "is_hybrid_model", False)
        stages = placement.stages
        layers = even(config.num_layers, stages) if hybrid else layers_by_stage(stock, stages, given)
    except PlanError as error:
        refuse(f"--pipeline-schedule {schedule} {error}")
    config.pipeline_model_parallel_layout = PlacedLayout(placement, layers, ahead)
    # The layout contains these.
    config.account_for_embedding_in_pipeline_split = config.account_for_loss_in_pipeline_split = False
    config.num_layers_in_first_pipeline_stage = config.num_layers_in_last_pipeline_stage = None


def hybrid_stage(session: Session, pattern: str, chunk: int | None) -> tuple[list[str], int] | None:
    """Returns the letters of this rank's layers in a hybrid model, and how many layers come before them.

    None if they are where stock has them.

    Args:
        pattern: letters of all layers, with ``|`` between stages if it places them.
        chunk: of this rank; None if it has one.
    """
    placement = session.current_placement
    if placement is None:
        return None
    layers = session.hybrid_layers
    if layers is None:
        try:
            layers = layers_by_stage(StockLayers(len(pattern.replace("|", "")), pattern=pattern), placement.stages)
        except PlanError as error:
            name = session.settings.get("pipeline_schedule") or session.args.pipeline_schedule
            refuse(f"--pipeline-schedule {name} {error}")
    stage = placement.stages_of(parallel_state.get_pipeline_model_parallel_rank())[chunk or 0]
    return list(letters_by_stage(pattern, layers)[stage]), sum(layers[:stage])


class LoopJob:
    """Job of the model with these chunks on this rank, from its first call on. Training calls count as iterations."""

    def __init__(self, session: Session, chunks: Sequence[torch.nn.Module], call: Mapping[str, Any]) -> None:
        self._done = 0
        _refuse_other_groups(call)
        asked = schedule_choice(FLAGS["schedule"], session.settings["pipeline_schedule"])
        refuse_unfit(chunks, asked, session.current_placement)
        spec, flags = loop_job(session.settings, chunks, call)
        job = session.plans.job(spec)
        placement = job.schedule.placement
        if placement.chunks != len(chunks):
            refuse(
                f"--pipeline-schedule {spec.settings.schedule.text} has {counted(placement.chunks, 'model chunk')} a "
                f"pipeline rank, and this loop built {len(chunks)}: set its virtual pipeline size to {placement.chunks}"
            )
        copies = tied.copies(chunks)
        if copies is not None and not torch.equal(*copies):
            refuse("the embedding and the output layer are tied and have different weights: load the same into both")
        if job.spec.recompute.granularity is None and spec.recompute.granularity is not None:
            _leave_out_recompute(chunks)
        session.planner = session.plans.planner(job)
        self._job = _begun(session, job, session.planner, flags, lambda: self._done + 1)

    def capturing(self, chunks: Sequence[torch.nn.Module], num_microbatches: int) -> AbstractContextManager[Capture]:
        """Works like :meth:`.ScheduleFunction.capturing`."""
        return self._job.function.capturing(chunks, num_microbatches)

    def __call__(self, **call: Any) -> list[Any]:
        """Runs one call; arguments and results as in stock."""
        results = self._job.function(**call)
        self._done += not call.get("forward_only", False)
        return results


def _begun(
    session: Session, job: JobPlan, planner: Planner, flags: RunFlags, iteration: Callable[[], int]
) -> RunningJob:
    """Begins a job's training: its schedule function, its log and replanning. Collective over all ranks."""
    spec, settings = job.spec, job.spec.settings
    session.layers = (spec.layers.count or 0) + spec.layers.ahead
    off = [f"pipeline schedule: {sentence}" for sentence in switched_off(spec, planner.first)]
    if dist.get_rank() == 0:  # it plans schedules by name, to compare with
        print_rank_0("\n".join([summary(job), libraries_line(), *off]))
    measured = measured_iterations(settings.measuring, flags.train_iters)
    profiler = partial(Profiler, planner, flags.model, iteration)
    log = RunLog(planner, iteration, flags.log_interval)
    function = ScheduleFunction(
        planner,
        session.running,
        session.late_checks,
        Messages(planner, flags.groups),
        log,
        stall_seconds=settings.stall_seconds,
        report_memory=measured is not None,
        observers=[*spans(), *([ProfilerRanges()] if flags.profiles else [])],
        lengths=BackgroundPlans(planner, attention_of(spec), flags.groups.timeout) if settings.plan_lengths else None,
        profiler=None if measured is None else profiler(measured),
        hiding=session.expert_messages if spec.hides_messages else None,
        masks_documents="reset_attention_mask" in spec.stock.given,
        verify=settings.verify,
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
        flags=flags,
        limit=settings.memory_limit,
        adopts=settings.replans,
    )
    function.between = replan.boundary
    return RunningJob(function, log, replan)


def _replans(spec: JobSpec, planner: Planner, first: MeasuredIterations, end: int) -> bool:
    """Returns whether the job plans again after its ``first`` measurement, before the ``end`` of this run.

    Without a flag, ``auto`` does so to say what a plan for measured costs would gain. Logs it then, and if a flag
    requests it but it is impossible.
    """
    by_flag, needed = spec.settings.replans, first.last + UNTIL_NEW
    if by_flag and needed > end:
        print_rank_0(
            f"pipeline schedule: the job does not plan again: it ends with iteration {end}, and a new order could run "
            f"from iteration {needed} on"
        )
    settings, request = spec.settings, planner.request
    follows = follows_costs(request.schedule, shared_vocabulary=settings.vocabulary_parallel)
    estimated = settings.schedule.name == AUTO and settings.costs is None and not settings.plan_lengths and follows
    # A graph of a whole iteration has no clocks, and with the other flag iterations are run again.
    estimated = estimated and spec.stock.cuda_graphs != WHOLE and RUN_AGAIN not in spec.stock.given
    by_itself = not by_flag and needed <= end and estimated
    if by_itself:
        print_rank_0(
            f"pipeline schedule: {AUTO} has no measured costs: it measures iterations {first.counted} to {first.last}, "
            f"and says what a plan for them would gain ({FLAGS['replan']} switches to it)"
        )
    return needed <= end and (by_flag or by_itself)


def _leave_out_recompute(chunks: Sequence[torch.nn.Module]) -> None:
    """Switches Megatron's recompute of whole layers off, which it decides in each forward."""
    for module in (module for chunk in chunks for module in chunk.modules()):
        config: Any = getattr(module, "config", None)
        if getattr(config, "recompute_granularity", None) == "full":
            config.recompute_granularity = None


def _refuse_other_groups(call: Mapping[str, Any]) -> None:
    """Refuses pipelines that ``parallel_state`` does not know."""
    if not parallel_state.model_parallel_is_initialized():
        refuse("--pipeline-schedule needs the process groups of megatron.core.parallel_state: initialize them")
    own = dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
    group = getattr(call.get("pg_collection"), "pp", None)
    if call.get("pg_collection") is not None and (group is None or dist.get_process_group_ranks(group) != own):
        refuse("--pipeline-schedule works in the pipeline of megatron.core.parallel_state only, not in pg_collection's")
