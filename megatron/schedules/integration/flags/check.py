"""Plan for the command line's flags, and all checks that may refuse them."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

from megatron.schedules.estimate.bounds import check_bounds
from megatron.schedules.estimate.model_build import MESSAGES
from megatron.schedules.integration.flags.costs_in_training import assumed, check_costs
from megatron.schedules.integration.flags.declared import FLAGS
from megatron.schedules.integration.flags.environment import check_environment, is_first
from megatron.schedules.integration.flags.incompatible import refusal, unsplittable
from megatron.schedules.integration.flags.machine_memory import check_host, device_bytes
from megatron.schedules.integration.flags.measuring import check_folder, measured_iterations
from megatron.schedules.integration.flags.plan_lengths import attention_of, check_plan_lengths
from megatron.schedules.integration.flags.reader import check_unscheduled, completed, settings_of, spec_of
from megatron.schedules.integration.flags.refuse import refuse
from megatron.schedules.integration.flags.replan_checks import check_replan
from megatron.schedules.job.job_request import LimitedRequest, auto_choices, request_of
from megatron.schedules.job.spec import JobSpec, Settings
from megatron.schedules.job.stage_layers import layers_by_stage
from megatron.schedules.job.values import MemorySaving
from megatron.schedules.planner.adaptive import limit_in_microbatches, search_seconds
from megatron.schedules.planner.plan_cache import takes_long
from megatron.schedules.planner.registry import AUTO, Request, check_parts
from megatron.schedules.planner.service import Plan, make_plan, or_named
from megatron.schedules.report.progress_bar import shown
from megatron.schedules.runtime.lowering import lower
from megatron.schedules.schedule.decisions import Decisions
from megatron.schedules.schedule.host_memory import taken
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.utils.cache_directory import plans_directory
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.late_imports import after_megatron
from megatron.schedules.utils.printable import printable


class PlannedJob(NamedTuple):
    """A job and its plan.

    Args:
        spec: the job.
        request: its planning request.
        schedule: the plan.
        assumed: text that describes the costs used for planning.
        explanation: reason why ``auto`` chose this plan; empty for other schedules.
    """

    spec: JobSpec
    request: Request
    schedule: Schedule
    assumed: str = ""
    explanation: str = ""

    @property
    def layers(self) -> tuple[int, ...]:
        """Decoder layers of each stage."""
        return self.request.decisions.layers or layers_by_stage(self.spec.layers, self.schedule.placement.stages)


def check(args: Any) -> PlannedJob | None:
    """Checks all our flags against Megatron's, parsed and not yet validated, and plans the job.

    If something cannot work, exits with status 2 after one line on standard error.

    Returns:
        The planned job; None without ``--pipeline-schedule``.

    Raises:
        TooEarlyError: a check needs Megatron, which is not imported yet.
    """
    try:
        if args.pipeline_schedule is None:
            check_unscheduled(args)
            return None
        check_environment()
        check_bounds(args)
        spec = spec_of(args)
        if spec.settings.dry_run is not None and not is_first():
            raise SystemExit(0)  # one process prints everything
        validate(spec)
        if spec.settings.measuring is not None and spec.settings.dry_run is None:
            check_folder(spec.settings.measuring.folder)
        return planned_job(completed(spec, args))
    except PlanError as error:
        _refuse(error, args)


def _refuse(error: PlanError, args: Any) -> NoReturn:
    message = error.told(FLAGS)
    named = message.startswith(("--", "$"))
    refuse(message if named else f"--pipeline-schedule {args.pipeline_schedule}: {message}")


def check_settings(args: Any) -> None:
    """Checks our flags alone, for a job whose model is not known yet. Refuses as :func:`check`."""
    try:
        settings = settings_of(args)
        check_parts(settings.parts, [settings.schedule.name], FLAGS)
        check_replan(settings)
    except PlanError as error:
        _refuse(error, args)


def validate(spec: JobSpec) -> None:
    """Runs the checks that need neither the model nor a plan.

    Raises:
        PlanError: a flag is wrong; the error names it.
    """
    settings, size = spec.settings, spec.sizes.pipeline
    name = settings.schedule.name
    if "yaml_cfg" in spec.stock.given:
        raise PlanError("--pipeline-schedule does not work with --yaml-cfg: Megatron drops every other flag then")
    check_parts(settings.parts, [name], FLAGS)
    if size < 2:
        raise PlanError(
            f"--pipeline-schedule {name} needs --pipeline-model-parallel-size 2 or more, not {size}; "
            "leave the flag out to run without a pipeline"
        )
    if spec.layers.pattern is not None:
        _check_hybrid(settings)
    check_plan_lengths(spec)
    measured_iterations(settings.measuring, spec.iterations)
    if name in ("adaptive", AUTO) and (fault := unsplittable(spec)):
        raise PlanError(f"--pipeline-schedule {name} {fault}")
    check_replan(settings)
    if settings.measures_limit and settings.dry_run is None:  # checked before a long search
        after_megatron("megatron.schedules.integration.rank_device").can_be_measured()
    if settings.places_layers and (spec.layers.by_hand or any(spec.layers.stand_in)):
        given = ",".join(map(str, settings.layers)) if isinstance(settings.layers, tuple) else settings.layers
        raise PlanError(
            f"{FLAGS['layers']} {given} places the layers itself: leave out --pipeline-model-parallel-layout, "
            "--decoder-first-pipeline-num-layers, --decoder-last-pipeline-num-layers and --account-for-...-split, and "
            "every | in --hybrid-layer-pattern"
        )


def _check_hybrid(settings: Settings) -> None:
    """Refuses flags that need time and memory of each layer, which are not estimated for hybrid models."""
    limit, dry_run = settings.memory_limit, settings.dry_run
    needing = {
        FLAGS["shared_vocabulary"]: settings.vocabulary_parallel,
        FLAGS["save_memory"]: settings.saving != MemorySaving(),
        FLAGS["plan_lengths"]: settings.plan_lengths,
        f"{FLAGS['layers']} auto": settings.layers == "auto",
        f"{FLAGS['memory_limit']} in GiB": limit is not None and limit.size is not None,
        f"{FLAGS['dry_run']} with the memory of a GPU": dry_run is not None and dry_run.device_bytes is not None,
    }
    for flag, is_given in needing.items():
        if is_given:
            raise PlanError(
                f"{flag} does not work with --hybrid-layer-pattern so far: time and memory of its layers are not "
                "estimated; leave the flag out"
            )


def planned_job(spec: JobSpec, *, quiet: bool = False) -> PlannedJob:
    """Plans ``spec``, after :func:`validate` has accepted it.

    Args:
        spec: the job, with its model and CSV.
        quiet: do not print progress.

    Raises:
        PlanError: a flag is wrong; the error names it.
        TooEarlyError: a check needs Megatron, which is not imported yet.
    """
    if spec.settings.plan_lengths:
        attention_of(spec)  # checked before a long search
    if spec.settings.schedule.name != AUTO:
        return _planned(spec, quiet)
    refused: list[PlanError] = []
    for each in filter(_is_valid, auto_choices(spec)):
        try:
            return _planned(each, quiet)
        except PlanError as error:
            refused.append(error)
    raise refused[0]


def _is_valid(spec: JobSpec) -> bool:
    """Returns whether a choice of ``auto`` is compatible with the other flags."""
    try:
        validate(spec)
    except PlanError:
        return False
    return True


def _planned(spec: JobSpec, quiet: bool) -> PlannedJob:
    settings = spec.settings
    check_costs(spec)
    plan = _made_within(request_of(spec, device_bytes(spec)), quiet)
    held = max(taken(plan.schedule, plan.costs))
    host_bytes = check_host(plan.request.costs, held, plan.request.ranks, is_dry=settings.dry_run is not None)
    if why := refusal(spec, plan.schedule):
        raise PlanError(f"--pipeline-schedule {settings.schedule.name} {why}")
    said = assumed(spec, plan.request) + _savings(plan.decisions, host_bytes)
    why = plan.explanation if settings.schedule.name == AUTO and is_first() and not quiet else ""
    return PlannedJob(spec, plan.request, plan.schedule, said, why)


def _made_within(limited: LimitedRequest, quiet: bool) -> Plan:
    """Returns the plan. With a limit in GiB, the plan leaves memory for all messages of its ranks."""
    room, plan = MESSAGES, made(limited.request, quiet)
    while plan.request.schedule == "adaptive" and limited.limit is not None and limited.limit.size is not None:
        held = max(program.messages_held for program in lower(plan.schedule, plan.costs))
        if held <= room:
            break
        settled = made(limited.within(plan.request, held), quiet)
        room, plan = held, or_named(replace(settled, asked=plan.asked, named=plan.named))
    return plan


def _savings(decisions: Decisions, host_bytes: float) -> str:
    """Describes recompute and offload of a job in one line."""
    host = f", {host_bytes / 2**30:.2f} GiB of each rank's at most on the host" if host_bytes else ""
    said = {"recomputed": "% of the layers recomputed", "offloaded": f"% of the layers' activations offloaded{host}"}
    return "".join(f"; {100 * share:.0f} {said[name]}" for name, share in decisions.mean_savings.items())


@lru_cache(maxsize=2)  # called before Megatron is imported, and again after it has parsed its flags
def made(request: Request, quiet: bool = False) -> Plan:
    """Returns the plan. If planning is slow, the first rank prints progress."""
    if request.schedule in ("adaptive", AUTO):
        if request.memory_limit is not None:
            limit_in_microbatches(request)  # checked before anything is printed
        said = f"searches about {search_seconds(request):.0f} s, unless {plans_directory()} has the plan"
    else:
        said = f"is planned now, unless {plans_directory()} has the plan" if takes_long(request) else ""
    what = f"pipeline schedule: {request.schedule}"
    if said and is_first() and not quiet:
        sys.stdout.write(f"{what} {printable(said)}\n")
        sys.stdout.flush()
    with shown(what, None if quiet or not is_first() else sys.stdout) as progress:
        return make_plan(request, progress)
