"""Our flags, and what is refused before anything starts."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from megatron.schedules.integration.layers import layers_by_stage
from megatron.schedules.integration.memory_limit import memory_limit
from megatron.schedules.planning.adaptive.plan import default_seconds, limit_in_microbatches
from megatron.schedules.planning.costs import Costs
from megatron.schedules.planning.errors import PlanError
from megatron.schedules.planning.passes import Kind
from megatron.schedules.planning.placement import Placement
from megatron.schedules.planning.registry import NAMES, Request, describe
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


def request_for(args: Any, num_microbatches: int, placement: Placement | None = None) -> Request:
    """The plan that ``args`` ask for with this many microbatches, on ``placement`` where that is settled.

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
        microbatches=num_microbatches,
        costs=_costs(args),
        chunks=2 if args.pipeline_schedule_chunks is None else args.pipeline_schedule_chunks,
        csv=text,
    )
    if request.schedule != "adaptive":
        return request
    return replace(
        request,
        memory_limit=memory_limit(args),
        search_seconds=args.pipeline_search_seconds,
        chunk_choices=_chunk_choices(args),
        placement=placement,
    )


def _costs(args: Any) -> Costs:
    costs, weights = Costs.parse(args.pipeline_schedule_costs), args.pipeline_schedule_stage_weights
    if weights is None:
        return costs
    try:
        return replace(costs, stage_weights=tuple(float(weight) for weight in weights.split(",")))
    except ValueError:
        raise PlanError(f"--pipeline-schedule-stage-weights {weights!r} is not a list such as 1.5,1,1,1.2") from None


def _chunk_choices(args: Any) -> tuple[int, ...]:
    """The numbers of chunks up to four that the layers divide into; one always, as stock has its own say on that."""
    if any(getattr(args, name, None) for name in _UNEVEN_LAYERS) or not args.num_layers:
        return (1,)
    size = args.pipeline_model_parallel_size
    return tuple(chunks for chunks in (1, 2, 3, 4) if chunks == 1 or not _wrong_layers(args, chunks * size))


def _wrong_layers(args: Any, stages: int) -> str:
    """Why the layers do not spread over so many stages; empty where they do."""
    try:
        layers_by_stage(args, stages)
    except PlanError as error:
        return str(error)
    return ""


def check(args: Any) -> Schedule:
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


def _checked(args: Any) -> Schedule:
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
    if name == "adaptive" and _is_set(args, "transformer_impl"):
        raise PlanError(f"--pipeline-schedule {name} does not work with --transformer-impl: {_LOCAL_ONLY}")
    try:
        request = request_for(args, _microbatches(args))
        if name == "adaptive":
            _announce_search(request)
        schedule = kept_plan(request)
    except PlanError as error:
        raise PlanError(f"--pipeline-schedule {name}: {error}") from None
    facts = _Facts(args, schedule)
    for rule in _RULES:
        if rule.applies(facts):
            raise PlanError(f"--pipeline-schedule {name} {rule.why(facts)}")
    return schedule


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
    batch = each if args.global_batch_size is None else args.global_batch_size
    n, rest = divmod(batch, each)
    if rest or n < 1:
        raise PlanError(
            f"--global-batch-size {batch} gives {batch / each:g} microbatches; it must be 1 or more times "
            f"micro batch {args.micro_batch_size} x data parallel {data_parallel} = {each}"
        )
    return n


def _announce_search(request: Request) -> None:
    """Say on the first rank that the job will stand still for a while, and why; a bad request raises first."""
    limit_in_microbatches(request)
    if int(os.environ.get("RANK", "0")) == 0:
        seconds = request.search_seconds or default_seconds(request.ranks, request.microbatches)
        sys.stdout.write(f"pipeline schedule adaptive: searches some {seconds:.0f} s, unless {folder()} has the plan\n")
        sys.stdout.flush()


def _is_set(args: Any, name: str) -> bool:
    value = getattr(args, name, None)
    return value not in (None, False, 0, "none", "local" if name == "transformer_impl" else None, [])


class _Facts(NamedTuple):
    args: Any
    schedule: Schedule

    def on(self, name: str) -> bool:
        """Whether stock's argument ``name`` is set to anything; false where this version has no such argument."""
        return _is_set(self.args, name)

    @property
    def splits(self) -> bool:
        return any(work.kind is Kind.W for _, work in self.schedule.passes())

    @property
    def chunks(self) -> int:
        return self.schedule.placement.chunks


class _Rule(NamedTuple):
    applies: Callable[[_Facts], bool]
    why: Callable[[_Facts], str]


def _flag(name: str, why: str, only: Callable[[_Facts], bool] = lambda facts: True) -> _Rule:
    """A rule against a stock argument being set."""
    written = "--" + name.replace("_", "-")
    return _Rule(lambda facts: facts.on(name) and only(facts), lambda facts: f"does not work with {written}: {why}")


def _several(facts: _Facts) -> bool:
    return facts.chunks > 1


def _ends_elsewhere(facts: _Facts) -> bool:
    placement = facts.schedule.placement
    return placement.rank_of[0] != 0 or placement.rank_of[-1] not in (0, placement.ranks - 1)


_STOCK_CHUNKS = "the schedule sets the number of chunks itself; leave the flag out"
_LOCAL_ONLY = (
    "only Megatron's local linears are split so far; use --transformer-impl local, or 1f1b, interleaved-1f1b or "
    "1f1b-v, which do not split the backward"
)
_UNEVEN_LAYERS = (
    "pipeline_model_parallel_layout",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
)
_UNEVEN = (
    "with several chunks a rank layers are spread evenly, and --account-for-embedding-in-pipeline-split and "
    "--account-for-loss-in-pipeline-split make the ends lighter; use those, or a schedule with one chunk a rank"
)

_RULES = (
    _Rule(
        lambda facts: facts.chunks > 1 and bool(_wrong_layers(facts.args, facts.schedule.placement.stages)),
        lambda facts: _wrong_layers(facts.args, facts.schedule.placement.stages),
    ),
    _Rule(
        _ends_elsewhere,
        lambda f: (
            "puts the embedding or the output layer in the middle of the ranks: stage 0 must be on rank 0 and "
            "the last stage on the first or the last rank"
        ),
    ),
    _flag("num_layers_per_virtual_pipeline_stage", _STOCK_CHUNKS),
    _flag("num_virtual_stages_per_pipeline_rank", _STOCK_CHUNKS),
    *(_flag(name, _UNEVEN, _several) for name in _UNEVEN_LAYERS),
    _flag(
        "transformer_impl",
        _LOCAL_ONLY,
        lambda facts: facts.splits,
    ),
    _flag("mtp_num_layers", "multi-token prediction is not supported yet; leave the flag out"),
    _flag("cuda_graph_impl", "CUDA graphs are not supported; leave the flag out"),
    _flag("enable_cuda_graph", "CUDA graphs are not supported; leave the flag out"),
    _flag("external_cuda_graph", "CUDA graphs are not supported; leave the flag out"),
    _flag("overlap_moe_expert_parallel_comm", "it brings a schedule of its own; leave the flag out"),
    _flag("delay_wgrad_compute", "the schedule places weight gradients itself; leave the flag out"),
    _flag("defer_embedding_wgrad_compute", "the schedule places weight gradients itself; leave the flag out"),
    _flag("moe_paged_stash", "it wraps the schedule; leave the flag out"),
    _flag("moe_expert_rank_capacity_factor", "it wraps the schedule; leave the flag out"),
    _flag("fine_grained_activation_offloading", "it counts on Megatron's own schedule; leave the flag out"),
    _flag("use_torch_fsdp2", "use Megatron's own data parallelism or distributed optimizer"),
    _flag("use_megatron_fsdp", "use Megatron's own data parallelism or distributed optimizer"),
    _flag("rampup_batch_size", "a CSV is for one number of microbatches", lambda f: f.args.pipeline_schedule == "file"),
    _flag("hybrid_layer_pattern", "hybrid models are not supported yet", _several),
    _flag(
        "num_microbatches_with_partial_activation_checkpoints",
        "it counts on Megatron's own schedule; leave the flag out",
    ),
)
