"""Our flags, and the plan they ask for."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from megatron.core.num_microbatches_calculator import StepBatchsizeNumMicroBatchesCalculator

from megatron.schedules.integration.layers import estimated_loads, placed_by_hand, wrong_layers
from megatron.schedules.integration.memory_limit import memory_limit
from megatron.schedules.integration.recompute import with_recompute
from megatron.schedules.integration.refusals import refusal, unsplittable
from megatron.schedules.planning.adaptive.plan import default_seconds, limit_in_microbatches
from megatron.schedules.planning.costs import Costs
from megatron.schedules.planning.errors import PlanError
from megatron.schedules.planning.registry import NAMES, Request, describe, plan
from megatron.schedules.planning.schedule import Schedule
from megatron.schedules.planning.store import folder, kept_plan


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags of this package to stock Megatron's parser."""
    group = parser.add_argument_group("pipeline schedule")
    summaries = "; ".join(f"{name}: {describe(name)}" for name in NAMES)
    group.add_argument(
        "--pipeline-schedule",
        metavar="NAME",
        help=f"Order of the pipeline's passes; Megatron's own without the flag. {summaries}.",
    )
    group.add_argument(
        "--pipeline-schedule-file",
        metavar="CSV",
        help="For --pipeline-schedule file: a compute-only CSV in torch.distributed.pipelining's form, one row a rank.",
    )
    group.add_argument(
        "--pipeline-schedule-chunks",
        metavar="V",
        type=int,
        help="Model chunks a rank, where the schedule leaves that open (interleaved-1f1b, default 2): more chunks make "
        "the bubble smaller and messages more.",
    )
    group.add_argument(
        "--pipeline-schedule-costs",
        metavar="F,B,W[,COMM]",
        default="1,1,1,0",
        help="Time of a forward, an input gradient, a weight gradient over half a rank's layers, and of a hop between "
        "ranks, in any unit: give measured ones and the schedule is ordered for them.",
    )
    group.add_argument(
        "--pipeline-memory-limit",
        metavar="X",
        help="For --pipeline-schedule adaptive: the most activation memory a rank may hold, as a fraction of 1F1B's, "
        "such as 0.5, or in GiB, such as 20GiB, by Megatron's own estimate of 1F1B's: give what your GPUs have left "
        "beside weights and optimizer.",
    )
    group.add_argument(
        "--pipeline-search-seconds",
        metavar="S",
        type=float,
        help="For --pipeline-schedule adaptive: how long to search, in seconds of a usual core; without it 2 to 100 by "
        "size. Give more for a long run. A plan is kept on disk ($MEGATRON_SCHEDULES_CACHE) and found at once again.",
    )
    group.add_argument(
        "--pipeline-schedule-stage-weights",
        metavar="X,X,...",
        help="Where some layers take longer, as those beside the embedding and the output layer do: the model cut into "
        "equal slices (as many as stages, or a multiple), how long each takes against the average, in model order.",
    )
    group.add_argument(
        "--pipeline-schedule-report-memory",
        action="store_true",
        help="Count the bytes of activations each rank really holds and print every rank's peak after the first "
        "iteration: to check a plan on your model. Costs a little host time.",
    )
    return parser


def mend_help(parser: argparse.ArgumentParser) -> None:
    """Make ``--help`` print: some stock flags have a percent sign in their help that argparse takes for a format."""
    for action in parser._actions:
        try:
            _ = (action.help or "") % {**vars(action), "prog": parser.prog}
        except (ValueError, TypeError, KeyError):
            action.help = str(action.help).replace("%", "%%")


def _request(args: Any) -> Request:
    """The plan that ``args`` ask for.

    Raises:
        PlanError: naming the flag that cannot be read.
    """
    text = None
    if args.pipeline_schedule_file is not None:
        try:
            text = Path(args.pipeline_schedule_file).read_text()
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "not a text file"
            raise PlanError(f"--pipeline-schedule-file {args.pipeline_schedule_file}: {why}") from None
    request = Request(
        schedule=args.pipeline_schedule,
        ranks=args.pipeline_model_parallel_size,
        microbatches=_microbatches(args),
        chunks=2 if args.pipeline_schedule_chunks is None else args.pipeline_schedule_chunks,
        csv=text,
    )
    if request.schedule == "adaptive":
        request = replace(
            request,
            memory_limit=memory_limit(args),
            search_seconds=args.pipeline_search_seconds,
            chunk_choices=_chunk_choices(args),
        )
    return replace(request, costs=_costs(args, request))


def _costs(args: Any, request: Request) -> Costs:
    costs, weights = Costs.parse(args.pipeline_schedule_costs), args.pipeline_schedule_stage_weights
    if args.recompute_granularity is not None:
        costs = with_recompute(costs, args, args.num_layers / _stages(request))
    if placed_by_hand(args):
        loads = estimated_loads(args, _stages(request))
        costs = replace(costs, stage_weights=loads.work, stage_activations=loads.activations)
    if weights is None:
        return costs
    try:
        return replace(costs, stage_weights=tuple(float(weight) for weight in weights.split(",")))
    except ValueError:
        raise PlanError(f"--pipeline-schedule-stage-weights {weights!r} is not a list such as 1.5,1,1,1.2") from None


def _stages(request: Request) -> int:
    """How many stages the plan will have, which its costs do not change."""
    if request.schedule == "adaptive":
        return request.ranks * request.chunk_choices[0]
    return plan(request if request.schedule == "file" else replace(request, microbatches=1)).placement.stages


def _chunk_choices(args: Any) -> tuple[int, ...]:
    """The numbers of chunks up to four that the layers spread over; only the largest where costs depend on it.

    Layers that spread over no number of chunks give one, and the rule about layers says why.
    """
    size = args.pipeline_model_parallel_size
    found = tuple(chunks for chunks in (1, 2, 3, 4) if not wrong_layers(args, chunks * size))
    depends = placed_by_hand(args) or args.recompute_method == "block"
    return (found[-1:] if depends else found) or (1,)


class Asked(NamedTuple):
    """What the command line asks for, and the plan that answers it."""

    request: Request
    schedule: Schedule


def check(args: Any) -> Asked:
    """Check all our flags against stock's, as parsed and before stock has validated them; the plan they ask for.

    Exits with status 2 after one line on standard error where something cannot work.
    """
    try:
        return _checked(args)
    except PlanError as error:
        refuse(str(error))


def refuse(message: str) -> NoReturn:
    """End this process with status 2; the first rank says why, in one line."""
    if int(os.environ.get("RANK", "0")) == 0:
        sys.stderr.write(f"{Path(sys.argv[0]).name}: error: {message}\n")
    raise SystemExit(2)


def _checked(args: Any) -> Asked:
    name, size = args.pipeline_schedule, args.pipeline_model_parallel_size
    if name in NAMES and size < 2:
        raise PlanError(
            f"--pipeline-schedule {name} needs --pipeline-model-parallel-size 2 or more, not {size}; "
            "leave the flag out to run without a pipeline"
        )
    if args.pipeline_schedule_file is not None and name != "file":
        raise PlanError(f"--pipeline-schedule-file goes with --pipeline-schedule file, not {name}")
    if args.pipeline_schedule_chunks is not None and name != "interleaved-1f1b":
        raise PlanError(
            f"--pipeline-schedule-chunks goes with --pipeline-schedule interleaved-1f1b; {name} has its own"
        )
    for flag in ("pipeline_memory_limit", "pipeline_search_seconds"):
        if getattr(args, flag) is not None and name != "adaptive":
            raise PlanError(f"--{flag.replace('_', '-')} goes with --pipeline-schedule adaptive, not {name}")
    if name == "adaptive" and (fault := unsplittable(args)):
        raise PlanError(f"--pipeline-schedule {name} {fault}")
    try:
        request = _request(args)
        if name == "adaptive":
            _announce_search(request)
        schedule = kept_plan(request)
    except PlanError as error:
        raise PlanError(f"--pipeline-schedule {name}: {error}") from None
    if why := refusal(args, schedule):
        raise PlanError(f"--pipeline-schedule {name} {why}")
    return Asked(request, schedule)


def _microbatches(args: Any) -> int:
    """n, as stock will compute it; stock's own message would come only after processes have met."""
    across = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    data_parallel, rest = divmod(args.world_size, across)
    if rest or not data_parallel:
        raise PlanError(
            f"{args.world_size} processes do not divide into tensor x pipeline x context parallel = {across} ranks; "
            f"start a multiple of {across}"
        )
    if not args.micro_batch_size or args.micro_batch_size < 1:
        raise PlanError(f"--micro-batch-size must be at least 1, not {args.micro_batch_size}")
    each = args.micro_batch_size * data_parallel
    flag, batches = _batches(args, each)
    # Steps that are behind a run may not divide on the GPUs it has now, as stock knows.
    fitting = [batch for batch in batches if batch > 0 and batch % each == 0]
    if not fitting:
        raise PlanError(
            f"{flag} {batches[0]} gives {batches[0] / each:g} microbatches; it must be 1 or more times "
            f"micro batch {args.micro_batch_size} x data parallel {data_parallel} = {each}"
        )
    return fitting[0] // each


def _batches(args: Any, each: int) -> tuple[str, list[int]]:
    """The flag that says the global batch size, and its sizes in the order in which a run comes to them."""
    flag, text = "--step-batch-size-schedule", args.step_batch_size_schedule
    if text is None:
        return "--global-batch-size", [each if args.global_batch_size is None else args.global_batch_size]
    try:
        steps = StepBatchsizeNumMicroBatchesCalculator._parse_schedule(text, None)
    except ValueError:
        steps = []
    if not steps:
        raise PlanError(f"{flag} {text!r} is not a list of TOKENS:BATCH such as '0:768 250B:1536'")
    return flag, [batch for _, batch in steps]


def _announce_search(request: Request) -> None:
    """Say on the first rank that the job will stand still for a while, and why; a bad request raises first."""
    limit_in_microbatches(request)
    if int(os.environ.get("RANK", "0")) == 0:
        seconds = request.search_seconds or default_seconds(request.ranks, request.microbatches)
        sys.stdout.write(f"pipeline schedule adaptive: searches some {seconds:.0f} s, unless {folder()} has the plan\n")
        sys.stdout.flush()
