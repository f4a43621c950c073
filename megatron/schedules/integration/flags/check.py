"""The plan that the command line asks for, and every reason to refuse it."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from megatron.schedules.estimate.bounds import check_bounds
from megatron.schedules.estimate.model_build import MESSAGES
from megatron.schedules.integration.flags.automatic import choices, device_limit
from megatron.schedules.integration.flags.costs import assumed, costs_of, layers_of
from megatron.schedules.integration.flags.declared import FLAGS
from megatron.schedules.integration.flags.environment import check_environment, is_first
from megatron.schedules.integration.flags.incompatible import refusal, unsplittable
from megatron.schedules.integration.flags.measuring import measured_iterations
from megatron.schedules.integration.flags.memory_saving import check_host, with_memory_saving
from megatron.schedules.integration.flags.plan_lengths import attention_of, check_plan_lengths
from megatron.schedules.integration.flags.reader import check_unscheduled, completed, spec_of
from megatron.schedules.integration.flags.refuse import refuse
from megatron.schedules.integration.flags.replan import check_replan, with_first_limit
from megatron.schedules.integration.late_imports import after_megatron
from megatron.schedules.integration.layers.by_stage import wrong_layers
from megatron.schedules.job.memory_limit import with_memory_limit
from megatron.schedules.job.spec import Batch, JobSpec
from megatron.schedules.job.values import MemoryLimit
from megatron.schedules.planner.adaptive import (
    FINER_CHUNKS,
    chunk_choices,
    limit_in_microbatches,
    search_seconds,
    wants_finer_chunks,
)
from megatron.schedules.planner.plan_cache import takes_long
from megatron.schedules.planner.registry import AUTO, Request, check_parts, stages
from megatron.schedules.planner.service import Plan, make_plan
from megatron.schedules.report.progress import shown
from megatron.schedules.runtime.lowering import lower
from megatron.schedules.schedule.decisions import Decisions
from megatron.schedules.schedule.host_memory import taken
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.size_limits import check_size
from megatron.schedules.utils.cache_directory import plans_directory
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.printable import counted, printable


class Planned(NamedTuple):
    """A job and its plan.

    Args:
        spec: the job.
        request: to the planner.
        schedule: the plan.
        assumed: what the job says of the costs it was planned for.
        explanation: why ``auto`` chose this plan; empty for other schedules.
    """

    spec: JobSpec
    request: Request
    schedule: Schedule
    assumed: str = ""
    explanation: str = ""


def check(args: Any) -> Planned | None:
    """Check all our flags against stock's, as parsed and before stock has validated them; the plan they ask for.

    Exits with status 2 after one line on standard error where something cannot work.

    Returns:
        None where no schedule is asked for.

    Raises:
        TooEarlyError: where a check needs Megatron, which is not imported yet.
    """
    try:
        return _checked(args)
    except PlanError as error:
        message = error.told(FLAGS)
        named = message.startswith(("--", "$"))
        refuse(message if named else f"--pipeline-schedule {args.pipeline_schedule}: {message}")


def _checked(args: Any) -> Planned | None:
    if args.pipeline_schedule is None:
        check_unscheduled(args)
        return None
    check_environment()
    check_bounds(args)
    spec = spec_of(args)
    if spec.settings.dry_run is not None and not is_first():
        raise SystemExit(0)  # one process says it all
    validate(spec)
    return planned_job(completed(spec, args))


def validate(spec: JobSpec) -> None:
    """Check what needs neither the model nor a plan.

    Raises:
        PlanError: naming the flag that is wrong.
    """
    settings, size = spec.settings, spec.sizes.pipeline
    name = settings.schedule.name
    if spec.stock.get("yaml_cfg") is not None:
        raise PlanError("--pipeline-schedule does not work with --yaml-cfg: Megatron drops every other flag then")
    check_parts(settings.parts, [name], FLAGS)
    if size < 2:
        raise PlanError(
            f"--pipeline-schedule {name} needs --pipeline-model-parallel-size 2 or more, not {size}; "
            "leave the flag out to run without a pipeline"
        )
    check_plan_lengths(spec)
    measured_iterations(settings.measuring, spec.iterations)
    if name in ("adaptive", AUTO) and (fault := unsplittable(spec)):
        raise PlanError(f"--pipeline-schedule {name} {fault}")
    check_replan(settings)
    if settings.measures_limit and settings.dry_run is None:  # refused before a search
        after_megatron("megatron.schedules.integration.free_device_memory").can_be_measured()
    if settings.layers != "even" and (spec.layers.by_hand or any(spec.layers.stand_in)):
        given = settings.layers if isinstance(settings.layers, str) else ",".join(map(str, settings.layers))
        raise PlanError(
            f"{FLAGS['layers']} {given} places the layers itself: leave out --pipeline-model-parallel-layout, "
            "--decoder-first-pipeline-num-layers, --decoder-last-pipeline-num-layers and --account-for-...-split"
        )


def planned_job(spec: JobSpec, *, quiet: bool = False) -> Planned:
    """The plan for ``spec``, which :func:`validate` has passed.

    Args:
        spec: the job, with its model and CSV.
        quiet: whether nobody is told how far the planning is.

    Raises:
        PlanError: naming the flag that is wrong.
        TooEarlyError: where a check needs Megatron, which is not imported yet.
    """
    settings = spec.settings
    if settings.plan_lengths:
        attention_of(spec)  # refused before a search
    if settings.schedule.name != AUTO:
        return _planned(spec, quiet)
    refused: PlanError | None = None
    for each in choices(spec):
        with suppress(PlanError):  # what may be chosen goes with the other flags, or is not chosen
            validate(each)
            try:
                return _planned(each, quiet)
            except PlanError as error:
                refused = refused or error
    assert refused is not None, "there is a choice"
    raise refused


def _planned(spec: JobSpec, quiet: bool) -> Planned:
    settings, request = spec.settings, _request(spec)
    plan = _made_within(spec, made(request, quiet), quiet)
    held = max(taken(plan.schedule, plan.costs))
    host_bytes = check_host(plan.request.costs, held, plan.request.ranks, is_dry=settings.dry_run is not None)
    if why := refusal(spec, plan.schedule):
        raise PlanError(f"--pipeline-schedule {settings.schedule.name} {why}")
    said = assumed(spec, plan.request) + _savings(plan.decisions, host_bytes)
    why = plan.explanation if settings.schedule.name == AUTO and is_first() and not quiet else ""
    return Planned(spec, plan.request, plan.schedule, said, why)


def _made_within(spec: JobSpec, plan: Plan, quiet: bool) -> Plan:
    """``plan``, or where its limit is in GiB one that leaves room for as many messages as its ranks hold."""
    room, limit = 0, _limit(spec, plan.asked)
    while plan.request.schedule == "adaptive" and limit is not None and limit.size is not None:
        held = max(program.messages_held for program in lower(plan.schedule, plan.costs))
        if held <= max(room, MESSAGES):
            break
        room = held
        plan = made(_limited(spec, plan.request, limit, room), quiet)
    return plan


def _limited(spec: JobSpec, request: Request, limit: MemoryLimit, messages: int = MESSAGES) -> Request:
    message = 0.0 if spec.trained is None else spec.trained.message_bytes
    given = spec.settings.memory_limit is not None
    named = FLAGS["memory_limit"] if given else f"{FLAGS['schedule']} {AUTO}: the memory that devices have left,"
    return with_memory_limit(named, limit, request, message, messages)


def _savings(decisions: Decisions, host_bytes: float) -> str:
    """What a job says of recompute and offload."""
    host = f", {host_bytes / 2**30:.2f} GiB of each rank's at most on the host" if host_bytes else ""
    said = {"recomputed": "% of the layers done again", "offloaded": f"% of the layers' activations offloaded{host}"}
    return "".join(f"; {100 * share:.0f} {said[name]}" for name, share in decisions.mean_savings.items())


@lru_cache(maxsize=2)  # asked for before Megatron is imported, and again when it has parsed its flags
def made(request: Request, quiet: bool = False) -> Plan:
    """The plan; where that takes a while, the first rank says so and how far it is."""
    if request.schedule in ("adaptive", AUTO):
        if request.memory_limit is not None:
            limit_in_microbatches(request)  # refused before anything is announced
        said = f"searches some {search_seconds(request):.0f} s, unless {plans_directory()} has the plan"
    else:
        said = f"planned anew unless {plans_directory()} has the plan" if takes_long(request) else ""
    what = f"pipeline schedule {request.schedule}"
    if said and is_first() and not quiet:
        sys.stdout.write(f"{what}: {printable(said)}\n")
        sys.stdout.flush()
    with shown(what, None if quiet or not is_first() else sys.stdout) as progress:
        return make_plan(request, progress)


def _request(spec: JobSpec) -> Request:
    """What the job asks of the planner.

    Raises:
        PlanError: naming the flag that is wrong.
    """
    chunks = spec.settings.schedule.chunks
    found = _request_up_to(spec, chunks or 4)
    if chunks is None and wants_finer_chunks(found):
        with suppress(PlanError):  # too few layers
            return _request_up_to(spec, FINER_CHUNKS)
    return found


def _request_up_to(spec: JobSpec, most: int) -> Request:
    """The same with ``most`` chunks a rank where they are chosen."""
    settings, choice = spec.settings, spec.settings.schedule
    request = Request(
        schedule=choice.name,
        ranks=spec.sizes.pipeline,
        microbatches=_microbatches(spec),
        chunks=choice.chunks or 2,
        csv=spec.csv,
    )
    searched = request.schedule in ("adaptive", AUTO)
    if searched:
        choices_of_chunks = _chunk_choices(spec, most)
        request = replace(request, search_seconds=settings.search_seconds, chunk_choices=choices_of_chunks)
    number = stages(request)
    request = replace(
        request,
        costs=costs_of(spec, number),
        decisions=Decisions(layers=layers_of(spec, number)),
        partition=settings.layers == "auto",
    )
    request = with_memory_saving(spec, request)
    limit = _limit(spec, request) if searched else None
    if limit is None:
        return request
    return with_first_limit(request) if limit.is_measured else _limited(spec, request, limit)


def _limit(spec: JobSpec, request: Request) -> MemoryLimit | None:
    """The flag's memory limit, and for ``auto`` without one what the devices have left."""
    given = spec.settings.memory_limit
    return device_limit(spec, request) if given is None and request.schedule == AUTO else given


def _chunk_choices(spec: JobSpec, most: int) -> tuple[int, ...]:
    """The numbers of chunks up to ``most`` that the layers spread over; only the largest where costs depend on it.

    Layers that spread over no number of chunks give one, and the rule about layers says why.
    """
    size, layers = spec.sizes.pipeline, spec.settings.layers
    if layers == "auto":
        return chunk_choices(most)
    found = tuple(chunks for chunks in range(1, most + 1) if not wrong_layers(spec.layers, chunks * size, layers))
    depends = spec.layers.by_hand or layers != "even" or spec.recompute.method == "block"
    return (found[-1:] if depends else found) or (1,)


def _microbatches(spec: JobSpec) -> int:
    """n, as stock will compute it; stock's own message would come only after processes have met."""
    sizes, chunks, micro = spec.sizes, spec.settings.schedule.chunks, spec.batch.micro
    data_parallel, rest = divmod(sizes.world, sizes.of_replica)
    if rest or not data_parallel:
        dry_run = f"{FLAGS['dry_run']} {sizes.world}: " if spec.settings.dry_run else ""
        raise PlanError(
            f"{dry_run}{sizes.world} processes do not divide into tensor x pipeline x context parallel = "
            f"{sizes.of_replica} ranks; start a multiple of {sizes.of_replica}"
        )
    if micro is None:
        raise PlanError("--micro-batch-size is missing: give the samples of a microbatch, 1 or more")
    each = micro * data_parallel
    flag, batches = _batches(spec.batch, each)
    # Steps that are behind a run may not divide on the GPUs it has now, as stock knows.
    fitting = [batch for batch in batches if batch > 0 and batch % each == 0]
    if not fitting:
        raise PlanError(
            f"{flag} {batches[0]} gives {batches[0] / each:g} microbatches; it must be 1 or more times "
            f"--micro-batch-size {micro} x data parallel {data_parallel} = {each}"
        )
    for batch in fitting:
        size, microbatches = sizes.pipeline, batch // each
        chunks_too = "" if chunks is None else f" and {chunks} chunks in {FLAGS['schedule']}"
        said = f"{FLAGS['ranks']} {size} with {flag} {batch}, {counted(microbatches, 'microbatch')}{chunks_too},"
        check_size(size, microbatches, chunks, said)
    return fitting[0] // each


def _batches(batch: Batch, each: int) -> tuple[str, list[int]]:
    """The flag that says the global batch size, and its sizes in the order in which a run comes to them."""
    flag, text = "--step-batch-size-schedule", batch.steps
    if text is None:
        return "--global-batch-size", [each if batch.whole is None else batch.whole]
    try:
        calculator = after_megatron("megatron.core.num_microbatches_calculator")
        steps = calculator.StepBatchsizeNumMicroBatchesCalculator._parse_schedule(text, None)
    except ValueError:
        steps = []
    if not steps:
        raise PlanError(f"{flag} {text!r} is not a list of TOKENS:BATCH such as '0:768 250B:1536'")
    return flag, [size for _, size in steps]
