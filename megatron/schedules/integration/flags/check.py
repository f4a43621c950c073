"""Plan for the command line's flags, and all checks that may refuse them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron.schedules.estimate.bounds import check_bounds
from megatron.schedules.integration.flags.declared import FLAGS
from megatron.schedules.integration.flags.environment import check_environment, is_first
from megatron.schedules.integration.flags.machine import machine_of
from megatron.schedules.integration.flags.reader import check_unscheduled, completed, settings_of, spec_of
from megatron.schedules.integration.flags.refuse import refuse
from megatron.schedules.job.checks import check_model, check_replan, validate
from megatron.schedules.job.measuring import check_folder
from megatron.schedules.job.plan_job import JobPlan, check_requests, plan_job
from megatron.schedules.job.spec import JobSpec
from megatron.schedules.planner.adaptive import limit_in_microbatches, search_seconds
from megatron.schedules.planner.plan_cache import takes_long
from megatron.schedules.planner.registry import AUTO, Request, check_parts
from megatron.schedules.planner.service import Plan, make_plan
from megatron.schedules.report.progress_bar import shown
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.printable import printable
from megatron.schedules.utils.private_folder import plans_directory


def checked(args: Any, *, is_built: bool = False) -> JobSpec | None:
    """Runs all checks of our flags against Megatron's, parsed and not yet validated, that need no plan.

    If something cannot work, exits with status 2 after one line on standard error.

    Args:
        args: Megatron's arguments.
        is_built: whether the model is built already.

    Returns:
        The job; None without ``--pipeline-schedule``.

    Raises:
        TooEarlyError: a check needs Megatron, which is not imported yet.
    """
    with refusing(args.pipeline_schedule):
        if args.pipeline_schedule is None:
            check_unscheduled(args)
            spec = None
        else:
            spec = _checked(args, is_built=is_built)
    return spec


def _checked(args: Any, *, is_built: bool) -> JobSpec:
    check_environment()
    check_bounds(args)
    spec = spec_of(args, is_built=is_built)
    if spec.settings.dry_run is not None and not is_first():
        raise SystemExit(0)  # one process prints everything
    validate(spec)
    if spec.settings.measuring is not None and spec.settings.dry_run is None:
        check_folder(spec.settings.measuring.folder)
    spec = completed(spec, args)
    check_model(spec)
    return spec


def planned(spec: JobSpec) -> JobPlan:
    """Plans a job. Refuses as :func:`checked`.

    Raises:
        TooEarlyError: it asks a device or a library, which Megatron's import brings.
    """
    with refusing(spec.settings.schedule.text):
        job = plan_job(spec, machine_of(spec), made)
    return job


def check_without_search(spec: JobSpec) -> None:
    """Refuses as :func:`planned` what is known to fail without a search."""
    with refusing(spec.settings.schedule.text):
        if spec.settings.schedule.is_searched:
            check_requests(spec, machine_of(spec))
        else:
            plan_job(spec, machine_of(spec))


@contextmanager
def refusing(schedule: str) -> Iterator[None]:
    """Refuses a job for a PlanError.

    Args:
        schedule: value of the schedule's flag.
    """
    try:
        yield
    except PlanError as error:
        message = error.told(FLAGS)
        named = message.startswith(("--", "$"))
        refuse(message if named else f"{FLAGS['schedule']} {schedule}: {message}")


def check_settings(args: Any) -> None:
    """Checks our flags alone, for a job whose model is not known yet. Refuses as :func:`checked`."""
    with refusing(args.pipeline_schedule):
        settings = settings_of(args)
        check_parts(settings.parts, [settings.schedule.name], FLAGS)
        check_replan(settings, FLAGS)


def made(request: Request) -> Plan:
    """Returns the plan. If planning is slow, the first rank prints progress."""
    if request.schedule in ("adaptive", AUTO):
        if request.memory_limit is not None:
            limit_in_microbatches(request)  # checked before anything is printed
        said = f"searches about {search_seconds(request):.0f} s, unless {plans_directory()} has the plan"
    else:
        said = f"is planned now, unless {plans_directory()} has the plan" if takes_long(request) else ""
    what = f"pipeline schedule: {request.schedule}"
    if said and is_first():
        sys.stdout.write(f"{what} {printable(said)}\n")
        sys.stdout.flush()
    with shown(what, sys.stdout if is_first() else None) as progress:
        return make_plan(request, progress)
