"""The plan that the command line asks for, and every reason to refuse it."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from megatron.schedules.estimate.bounds import check_bounds
from megatron.schedules.estimate.model_build import MESSAGES, message_bytes
from megatron.schedules.integration.flags.costs import assumed, costs_of, layers_of
from megatron.schedules.integration.flags.declared import FLAGS
from megatron.schedules.integration.flags.dry_run_machine import supposed_gpus
from megatron.schedules.integration.flags.environment import check_environment, is_first
from megatron.schedules.integration.flags.incompatible import refusal, unsplittable
from megatron.schedules.integration.flags.measuring import measured_iterations
from megatron.schedules.integration.flags.memory_saving import check_host, with_relief
from megatron.schedules.integration.flags.plan_lengths import check_plan_lengths
from megatron.schedules.integration.flags.refuse import refuse
from megatron.schedules.integration.flags.replan import check_replan, with_first_limit
from megatron.schedules.integration.flags.settings import check_unscheduled, settings_of
from megatron.schedules.integration.late_imports import after_megatron
from megatron.schedules.integration.layers.by_stage import placed_by_hand, wrong_layers
from megatron.schedules.job.memory_limit import with_memory_limit
from megatron.schedules.job.settings import Settings
from megatron.schedules.planner.adaptive import chunk_choices, limit_in_microbatches, search_seconds
from megatron.schedules.planner.plan_cache import takes_long
from megatron.schedules.planner.registry import AUTO, NAMES, Request, check_parts, stages
from megatron.schedules.planner.service import Plan, make_plan
from megatron.schedules.report.progress import shown
from megatron.schedules.runtime.lowering import lower
from megatron.schedules.schedule.decisions import Decisions
from megatron.schedules.schedule.host_memory import taken
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.size_limits import check_size
from megatron.schedules.utils.cache_directory import plans_directory
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.parsing import read_text
from megatron.schedules.utils.printable import printable


class Planned(NamedTuple):
    """What the command line asks for, and the plan that answers it.

    Args:
        request, schedule: both.
        assumed: what the job says of the costs it was planned for.
    """

    request: Request
    schedule: Schedule
    assumed: str = ""


def check(args: Any, search_seconds: float | None = None) -> Planned | None:
    """Check all our flags against stock's, as parsed and before stock has validated them; the plan they ask for.

    Exits with status 2 after one line on standard error where something cannot work.

    Args:
        args: Megatron's.
        search_seconds: in place of the environment's.

    Returns:
        None where no schedule is asked for.

    Raises:
        TooEarlyError: where a check needs Megatron, which is not imported yet.
    """
    try:
        return _checked(args, search_seconds)
    except PlanError as error:
        message = error.told(FLAGS)
        named = message.startswith(("--", "$"))
        refuse(message if named else f"--pipeline-schedule {args.pipeline_schedule}: {message}")


def _checked(args: Any, search_seconds: float | None) -> Planned | None:
    if args.pipeline_schedule is None:
        check_unscheduled(args)
        return None
    check_environment()
    check_bounds(args)
    settings = settings_of(args)
    if search_seconds is not None:
        settings = replace(settings, search_seconds=search_seconds)
    name, size, dry_run = settings.schedule.name, args.pipeline_model_parallel_size, settings.dry_run
    if dry_run is not None:
        args.world_size, _ = supposed_gpus(args, dry_run.gpus)
        if not is_first():
            raise SystemExit(0)  # one process says it all
    if getattr(args, "yaml_cfg", None) is not None:
        raise PlanError("--pipeline-schedule does not work with --yaml-cfg: Megatron drops every other flag then")
    if name == AUTO:
        raise PlanError(
            f"--pipeline-schedule {AUTO} is for the command line; in training name one of {', '.join(NAMES)}"
        )
    check_parts(settings.parts, [name], FLAGS)
    if size < 2:
        raise PlanError(
            f"--pipeline-schedule {name} needs --pipeline-model-parallel-size 2 or more, not {size}; "
            "leave the flag out to run without a pipeline"
        )
    check_plan_lengths(args, settings)
    measured_iterations(settings.measuring, getattr(args, "train_iters", None))
    if name == "adaptive" and (fault := unsplittable(args, settings)):
        raise PlanError(f"--pipeline-schedule {name} {fault}")
    check_replan(settings)
    if settings.measures_limit and dry_run is None:  # refused before a search
        after_megatron("megatron.schedules.integration.free_device_memory").can_be_measured()
    _check_layers(args, settings)
    plan = _made_within(args, settings, made(_request(args, settings)))
    held = max(taken(plan.schedule, plan.costs))
    host_bytes = check_host(plan.request.costs, held, plan.request.ranks, is_dry=dry_run is not None)
    if why := refusal(args, settings, plan.schedule):
        raise PlanError(f"--pipeline-schedule {name} {why}")
    said = assumed(args, settings, plan.request) + _savings(plan.decisions, host_bytes)
    return Planned(plan.request, plan.schedule, said)


def _made_within(args: Any, settings: Settings, plan: Plan) -> Plan:
    """``plan``, or where its limit is in GiB one that leaves room for as many messages as its ranks hold."""
    room, limit = 0, settings.memory_limit
    while plan.request.schedule == "adaptive" and limit is not None and limit.size is not None:
        held = max(program.messages_held for program in lower(plan.schedule, plan.costs))
        if held <= max(room, MESSAGES):
            break
        room = held
        plan = made(with_memory_limit(FLAGS["memory_limit"], limit, plan.request, message_bytes(args), room))
    return plan


def _savings(decisions: Decisions, host_bytes: float) -> str:
    """What a job says of recompute and offload."""
    host = f", {host_bytes / 2**30:.2f} GiB of each rank's at most on the host" if host_bytes else ""
    said = {"recomputed": "% of the layers done again", "offloaded": f"% of the layers' activations offloaded{host}"}
    return "".join(f"; {100 * share:.0f} {said[name]}" for name, share in decisions.mean_savings.items())


def _check_layers(args: Any, settings: Settings) -> None:
    """Refuse a layer partition if another flag says it too."""
    alike = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
    if settings.layers != "even" and (placed_by_hand(args) or any(getattr(args, name) for name in alike)):
        raise PlanError(
            f"{FLAGS['layers']} {args.pipeline_layers} places the layers itself: leave out "
            "--pipeline-model-parallel-layout, --decoder-first-pipeline-num-layers, "
            "--decoder-last-pipeline-num-layers and --account-for-...-split"
        )


@lru_cache(maxsize=2)  # asked for before Megatron is imported, and again when it has parsed its flags
def made(request: Request) -> Plan:
    """The plan; where that takes a while, the first rank says so and how far it is."""
    if request.schedule == "adaptive":
        limit_in_microbatches(request)  # refused before anything is announced
        said = f"searches some {search_seconds(request):.0f} s, unless {plans_directory()} has the plan"
    else:
        said = f"planned anew unless {plans_directory()} has the plan" if takes_long(request) else ""
    what = f"pipeline schedule {request.schedule}"
    if said and is_first():
        sys.stdout.write(f"{what}: {printable(said)}\n")
        sys.stdout.flush()
    with shown(what, sys.stdout if is_first() else None) as progress:
        return make_plan(request, progress)


def _request(args: Any, settings: Settings) -> Request:
    """The plan that ``args`` ask for.

    Raises:
        PlanError: naming the flag that cannot be read.
    """
    choice = settings.schedule
    request = Request(
        schedule=choice.name,
        ranks=args.pipeline_model_parallel_size,
        microbatches=_microbatches(args, choice.chunks),
        chunks=choice.chunks or 2,
        csv=None if choice.file is None else read_text(choice.file, "csv"),
    )
    if request.schedule == "adaptive":
        choices = _chunk_choices(args, settings, choice.chunks or 4)
        request = replace(request, search_seconds=settings.search_seconds, chunk_choices=choices)
    number = stages(request)
    request = replace(
        request,
        costs=costs_of(args, settings, number),
        decisions=Decisions(layers=layers_of(args, settings, number)),
        partition=settings.layers == "auto",
    )
    request = with_relief(args, settings, request)
    if request.schedule != "adaptive" or settings.memory_limit is None:
        return request
    if settings.measures_limit:
        return with_first_limit(request)
    return with_memory_limit(FLAGS["memory_limit"], settings.memory_limit, request, message_bytes(args))


def _chunk_choices(args: Any, settings: Settings, most: int) -> tuple[int, ...]:
    """The numbers of chunks up to ``most`` that the layers spread over; only the largest where costs depend on it.

    Layers that spread over no number of chunks give one, and the rule about layers says why.
    """
    size = args.pipeline_model_parallel_size
    if settings.layers == "auto":
        return chunk_choices(most)
    found = tuple(chunks for chunks in range(1, most + 1) if not wrong_layers(args, chunks * size, settings.layers))
    depends = placed_by_hand(args) or settings.layers != "even" or args.recompute_method == "block"
    return (found[-1:] if depends else found) or (1,)


def _microbatches(args: Any, chunks: int | None) -> int:
    """n, as stock will compute it; stock's own message would come only after processes have met."""
    across = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    data_parallel, rest = divmod(args.world_size, across)
    if rest or not data_parallel:
        dry_run = f"{FLAGS['dry_run']} {args.world_size}: " if getattr(args, "pipeline_dry_run", None) else ""
        raise PlanError(
            f"{dry_run}{args.world_size} processes do not divide into tensor x pipeline x context parallel = "
            f"{across} ranks; start a multiple of {across}"
        )
    if args.micro_batch_size is None:
        raise PlanError("--micro-batch-size is missing: give the samples of a microbatch, 1 or more")
    each = args.micro_batch_size * data_parallel
    flag, batches = _batches(args, each)
    # Steps that are behind a run may not divide on the GPUs it has now, as stock knows.
    fitting = [batch for batch in batches if batch > 0 and batch % each == 0]
    if not fitting:
        raise PlanError(
            f"{flag} {batches[0]} gives {batches[0] / each:g} microbatches; it must be 1 or more times "
            f"--micro-batch-size {args.micro_batch_size} x data parallel {data_parallel} = {each}"
        )
    for batch in fitting:
        size, microbatches = args.pipeline_model_parallel_size, batch // each
        chunks_too = "" if chunks is None else f" and {chunks} chunks in {FLAGS['schedule']}"
        said = f"{FLAGS['ranks']} {size} with {flag} {batch}, {microbatches} microbatches{chunks_too},"
        check_size(size, microbatches, chunks, said)
    return fitting[0] // each


def _batches(args: Any, each: int) -> tuple[str, list[int]]:
    """The flag that says the global batch size, and its sizes in the order in which a run comes to them."""
    flag, text = "--step-batch-size-schedule", args.step_batch_size_schedule
    if text is None:
        return "--global-batch-size", [each if args.global_batch_size is None else args.global_batch_size]
    try:
        calculator = after_megatron("megatron.core.num_microbatches_calculator")
        steps = calculator.StepBatchsizeNumMicroBatchesCalculator._parse_schedule(text, None)
    except ValueError:
        steps = []
    if not steps:
        raise PlanError(f"{flag} {text!r} is not a list of TOKENS:BATCH such as '0:768 250B:1536'")
    return flag, [batch for _, batch in steps]
