"""The plan that the command line asks for, and every reason to refuse it."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from megatron.schedules.estimate.bounds import BOUNDS, check_bounds
from megatron.schedules.integration.flags.costs import assumed, costs_of
from megatron.schedules.integration.flags.declared import FLAGS, given
from megatron.schedules.integration.flags.dry_run_machine import device_memory, supposed_gpus, supposes
from megatron.schedules.integration.flags.environment import check_environment, is_first
from megatron.schedules.integration.flags.incompatible import refusal, unsplittable
from megatron.schedules.integration.flags.memory_limit import (
    MESSAGES,
    is_in_gib,
    with_memory_limit,
)
from megatron.schedules.integration.flags.memory_saving import check_host, with_relief
from megatron.schedules.integration.flags.plan_lengths import check_plan_lengths
from megatron.schedules.integration.flags.profile import profile_asked
from megatron.schedules.integration.flags.refuse import refuse
from megatron.schedules.integration.flags.replan import check_replan, measures_limit, with_first_limit
from megatron.schedules.integration.late_imports import after_megatron
from megatron.schedules.integration.layers.by_stage import placed_by_hand, placed_by_planner, wrong_layers
from megatron.schedules.planner.adaptive import chunk_choices, limit_in_microbatches, search_seconds
from megatron.schedules.planner.plan_cache import kept_plan, kept_relief, kept_spread, takes_long
from megatron.schedules.planner.registry import NAMES, Request, check_parts, stages, with_own_relief
from megatron.schedules.report.progress import shown
from megatron.schedules.runtime.lowering import lower
from megatron.schedules.schedule.host_memory import taken
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.size_limits import check_size
from megatron.schedules.utils.cache_directory import plans_directory
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.parsing import integer, not_negative, positive, read_text
from megatron.schedules.utils.printable import counted, printable

# Longer than passes take, first compilations mostly included; much shorter than NCCL's watchdog waits.
_STALL_SECONDS = 120.0


class Planned(NamedTuple):
    """What the command line asks for, and the plan that answers it.

    Args:
        request, schedule: both.
        assumed: what the job says of the costs it was planned for.
    """

    request: Request
    schedule: Schedule
    assumed: str = ""


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
    name, size, ours = args.pipeline_schedule, args.pipeline_model_parallel_size, given(args)
    if name is None:
        check_parts(ours, [], FLAGS)
        if ours:
            raise PlanError(f"{FLAGS[ours[0]]} goes with --pipeline-schedule: name one of {', '.join(NAMES)}")
        return None
    check_environment()
    check_bounds(args)
    device_memory(args)  # refused before anything is planned
    if supposes(args):
        args.world_size, _ = supposed_gpus(args)
        if not is_first():
            raise SystemExit(0)  # one process says it all
    if getattr(args, "yaml_cfg", None) is not None:
        raise PlanError("--pipeline-schedule does not work with --yaml-cfg: Megatron drops every other flag then")
    check_parts(ours, [name], FLAGS)
    if size < 2:
        raise PlanError(
            f"--pipeline-schedule {name} needs --pipeline-model-parallel-size 2 or more, not {size}; "
            "leave the flag out to run without a pipeline"
        )
    stall_seconds(args)  # refused before anything is announced
    check_plan_lengths(args)
    profile_asked(args)
    if name == "adaptive" and (fault := unsplittable(args)):
        raise PlanError(f"--pipeline-schedule {name} {fault}")
    check_replan(args)
    if measures_limit(args) and not supposes(args):  # refused before a search
        after_megatron("megatron.schedules.integration.free_device_memory").can_be_measured()
    request = _request(args)
    _check_layers(args)
    if placed_by_planner(args):
        request = spread(request)
    if request.recompute or request.offload:
        request = settled(request)
    request, schedule = _planned_within(args, request)
    host_bytes = check_host(args, request.costs, max(taken(schedule, request.costs.on(schedule.placement))))
    if why := refusal(args, schedule):
        raise PlanError(f"--pipeline-schedule {name} {why}")
    return Planned(request, schedule, assumed(args, request.costs) + _relief(request, host_bytes))


def _planned_within(args: Any, request: Request) -> tuple[Request, Schedule]:
    """The plan, and the request with room for as many messages as the plan's ranks hold where its limit is in GiB."""
    schedule, room = planned(request), 0
    while request.schedule == "adaptive" and is_in_gib(args):
        programs = lower(schedule, request.costs.on(schedule.placement))
        held = max(program.messages_held for program in programs)
        if held <= max(room, MESSAGES):
            break
        room = held
        request = with_memory_limit(args, request, room)
        schedule = planned(request)
    return request, schedule


@lru_cache(maxsize=2)
def spread(request: Request) -> Request:
    """The request with its layers placed; the first rank says how far the search for that is."""
    with shown("placing layers", sys.stdout if is_first() else None) as progress:
        return kept_spread(request, progress)


@lru_cache(maxsize=2)
def settled(request: Request) -> Request:
    """The request with what is recomputed and offloaded; the first rank says how far the search for that is."""
    limit_in_microbatches(request)  # refused before anything is announced
    with shown("choosing what to relieve", sys.stdout if is_first() else None) as progress:
        return kept_relief(request, progress)


def _relief(request: Request, host_bytes: float) -> str:
    """What a job says of it."""
    host = f", {host_bytes / 2**30:.2f} GiB of each rank's at most on the host" if host_bytes else ""
    said = {"redone": "% of the layers done again", "offloaded": f"% of the layers' activations offloaded{host}"}
    return "".join(f"; {100 * share:.0f} {said[name]}" for name, share in request.costs.mean_relief.items())


def _check_layers(args: Any) -> None:
    """Refuse what says where layers go if it cannot be read, or if another flag says it too."""
    text, flag = args.pipeline_schedule_layers, FLAGS["layers"]
    if text not in (None, "even", "auto"):
        raise PlanError(f"{flag} {text!r} is unknown: use auto or even")
    alike = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
    if placed_by_planner(args) and (placed_by_hand(args) or any(getattr(args, name) for name in alike)):
        raise PlanError(
            f"{flag} auto places the layers itself: leave out --pipeline-model-parallel-layout, "
            "--decoder-first-pipeline-num-layers, --decoder-last-pipeline-num-layers and --account-for-...-split"
        )


@lru_cache(maxsize=2)  # asked for before Megatron is imported, and again when it has parsed its flags
def planned(request: Request) -> Schedule:
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
        return kept_plan(request, progress)


def stall_seconds(args: Any) -> float:
    """How long a pipeline may stand still, 0 for ever.

    Raises:
        PlanError: where that cannot be read.
    """
    text = args.pipeline_schedule_stall_seconds
    seconds = not_negative(FLAGS["stall_seconds"], text, "a number of seconds, or 0 for no limit,")
    return _STALL_SECONDS if seconds is None else seconds


def _request(args: Any) -> Request:
    """The plan that ``args`` ask for.

    Raises:
        PlanError: naming the flag that cannot be read.
    """
    file = args.pipeline_schedule_file
    least, most = BOUNDS[FLAGS["chunks"]]
    chunks = integer(FLAGS["chunks"], args.pipeline_schedule_chunks, least, "a rank holds 1 chunk or more", most)
    request = Request(
        schedule=args.pipeline_schedule,
        ranks=args.pipeline_model_parallel_size,
        microbatches=_microbatches(args, chunks),
        chunks=chunks or 2,
        csv=None if file is None else read_text(Path(file), "csv"),
    )
    if request.schedule == "adaptive":
        request = replace(
            request,
            search_seconds=positive(
                FLAGS["search_seconds"], args.pipeline_search_seconds, "a positive number of seconds"
            ),
            chunk_choices=_chunk_choices(args, chunks or 4),
        )
    request = with_own_relief(with_relief(args, replace(request, costs=costs_of(args, stages(request)))))
    if request.schedule != "adaptive":
        return request
    return with_first_limit(request) if measures_limit(args) else with_memory_limit(args, request)


def _chunk_choices(args: Any, most: int) -> tuple[int, ...]:
    """The numbers of chunks up to ``most`` that the layers spread over; only the largest where costs depend on it.

    Layers that spread over no number of chunks give one, and the rule about layers says why.
    """
    size = args.pipeline_model_parallel_size
    if placed_by_planner(args):
        return chunk_choices(most)
    found = tuple(chunks for chunks in range(1, most + 1) if not wrong_layers(args, chunks * size))
    depends = placed_by_hand(args) or args.recompute_method == "block"
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
        chunks_too = "" if chunks is None else f" and {FLAGS['chunks']} {chunks}"
        said = f"{FLAGS['ranks']} {size} with {flag} {batch}, {counted(microbatches, 'microbatch')}{chunks_too},"
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
