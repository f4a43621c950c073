"""Every name of stock Megatron's that is replaced, with the reason. Nothing of it is replaced anywhere else.

Without ``--pipeline-schedule`` each replacement only calls what it replaced; one, which lets jobs begin from the wheel,
does its part then too.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from datetime import timedelta
from types import ModuleType
from typing import Any, NamedTuple

from megatron.core import parallel_state
from megatron.core.datasets import utils as dataset_utils
from megatron.core.dist_checkpointing.strategies import fully_parallel
from megatron.core.rerun_state_machine import RerunStateMachine
from megatron.training import arguments, checkpointing, training
from megatron.training.models import dist_utils
from torch import Tensor

from megatron.schedules.integration import checkpoints, log_line
from megatron.schedules.integration.compiled_helpers import came_compiled
from megatron.schedules.integration.cpu import standin
from megatron.schedules.integration.dry_run import dry_run
from megatron.schedules.integration.flags.check import check
from megatron.schedules.integration.flags.declared import add_arguments, mend_help
from megatron.schedules.integration.flags.early import refuse_early
from megatron.schedules.integration.flags.measuring import measured_iterations
from megatron.schedules.integration.flags.plan_lengths import attention_of
from megatron.schedules.integration.flags.planner import Planner
from megatron.schedules.integration.flags.refuse import refuse
from megatron.schedules.integration.gpu_libraries import found
from megatron.schedules.integration.layers import tied
from megatron.schedules.integration.layers.by_stage import layers_by_stage
from megatron.schedules.integration.layers.layout import PlacedLayout
from megatron.schedules.integration.lengths.background import LengthsBeside
from megatron.schedules.integration.log.run_log import RunLog
from megatron.schedules.integration.messages import Messages
from megatron.schedules.integration.profiling import Profiler
from megatron.schedules.integration.replan import JobReplan
from megatron.schedules.integration.schedule_function import ScheduleFunction
from megatron.schedules.integration.session import Replacement, Session
from megatron.schedules.integration.vocabulary.build import share_vocabulary
from megatron.schedules.job.spec import JobSpec
from megatron.schedules.planner.layer_partition import as_layout
from megatron.schedules.runtime.ranges import ProfilerRanges


class Hook(NamedTuple):
    """One name of stock's that is replaced: by ``make(stock, session)``."""

    module: ModuleType | type
    name: str
    why: str
    make: Callable[[Replacement, Session], Replacement]


def _parse_args(stock: Replacement, session: Session) -> Replacement:
    def parse_args(extra_args_provider: Any = None, *args: Any, **kwargs: Any) -> Any:
        def both(parser: Any) -> Any:
            parser = add_arguments(parser)
            parser = parser if extra_args_provider is None else extra_args_provider(parser)
            mend_help(parser)
            refuse_early(sys.argv[1:])  # with --yaml-cfg nothing of ours comes out of the parsing
            return parser

        return stock(both, *args, **kwargs)

    return parse_args


def _validate_args(stock: Replacement, session: Session) -> Replacement:
    def validate_args(args: Any, *rest: Any, **kwargs: Any) -> Any:
        asked = check(args) if hasattr(args, "pipeline_schedule") else None
        if asked is None:
            return stock(args, *rest, **kwargs)
        spec, settings = asked.spec, asked.spec.settings
        if settings.dry_run is not None:
            dry_run(asked, settings.dry_run)
        if standin.needed() and not standin.enabled():
            refuse(
                "no CUDA device here, and Megatron requires one: to try it on the CPU call "
                'megatron.schedules.without_gpu() before Megatron is imported (docs/install.md)'
            )
        if settings.vocabulary_parallel and spec.shape is not None:
            args.padded_vocab_size = spec.shape.vocabulary
        placement = asked.schedule.placement
        placed = None if settings.layers == "even" else asked.request.decisions.layers
        if placed is not None:  # as if it had been written so
            args.pipeline_model_parallel_layout = as_layout(placed, args.mtp_num_layers or 0)
        layers = placed or (layers_by_stage(spec.layers, placement.stages) if placement.chunks > 1 else ())
        result = stock(args, *rest, **kwargs)
        if placement.chunks > 1:
            args.virtual_pipeline_model_parallel_size = placement.chunks
            # These are of stock's own interleaving.
            args.overlap_p2p_comm = args.align_param_gather = False
            args.pipeline_model_parallel_layout = PlacedLayout(placement, layers, args.mtp_num_layers or 0)
            # The layout says it; stock's configuration takes one or the other.
            args.account_for_embedding_in_pipeline_split = args.account_for_loss_in_pipeline_split = False
            args.decoder_first_pipeline_num_layers = args.decoder_last_pipeline_num_layers = None
        session.args, session.spec, session.planner = args, spec, Planner(asked)
        return result

    return validate_args


def _get_forward_backward_func(stock: Replacement, session: Session) -> Replacement:
    def get_forward_backward_func(*args: Any, **kwargs: Any) -> Any:
        if session.planner is None or session.spec is None:
            return stock(*args, **kwargs)
        if session.function is None:
            training.print_rank_0(f"{session.planner.summary()}\n{found()}")
            settings, args_now = session.spec.settings, session.args
            measured = measured_iterations(settings.measuring, args_now.train_iters)
            session.log = RunLog(session.planner, args_now)
            session.function = ScheduleFunction(
                session.planner,
                session.running,
                session.late_checks,
                Messages(session.planner, args_now),
                stall_seconds=settings.stall_seconds,
                report_memory=measured is not None,
                observers=[ProfilerRanges()] if args_now.profile else (),
                lengths=_lengths(session.planner, session.spec, args_now) if settings.plan_lengths else None,
                watchers=[session.log],
                profiler=None if measured is None else Profiler(session.planner, args_now, measured),
            )
            if settings.replans:
                session.replan = JobReplan(
                    session.planner,
                    args_now,
                    session.function,
                    session.log.slow,
                    asked=measured,
                    measures_limit=settings.measures_limit,
                )
                session.function.between = session.replan.boundary
        return session.function

    return get_forward_backward_func


def _lengths(planner: Planner, spec: JobSpec, args: Any) -> LengthsBeside:
    return LengthsBeside(planner, attention_of(spec), timedelta(minutes=args.distributed_timeout_minutes))


def _validate_result(stock: Replacement, session: Session) -> Replacement:
    def validate_result(machine: RerunStateMachine, result: Any, *args: Any, **kwargs: Any) -> None:
        if session.late_checks.waiting and isinstance(result, Tensor):
            # As it is now: stock goes on to scale the loss in place.
            result = result.detach().clone()
        session.late_checks.add(functools.partial(stock, machine, result, *args, **kwargs))

    return validate_result


def _placed(build: Replacement, session: Session) -> Replacement:
    """``build`` of one model chunk, with the embedding and the output layer where the placement has them."""
    if not session.loss_on_first_rank:
        return build
    takes = inspect.signature(build).parameters

    def build_chunk(*args: Any, **kwargs: Any) -> Any:
        kwargs["pre_process"], kwargs["post_process"] = session.first_and_last(kwargs.get("vp_stage"))
        known = any(p.kind is p.VAR_KEYWORD for p in takes.values())
        return build(*args, **{k: v for k, v in kwargs.items() if known or k in takes})

    return build_chunk


def _shared(build: Replacement, planner: Planner) -> Replacement:
    """``build`` of one model chunk after another; with the last of a rank its parts of the vocabulary are put in."""
    built: list[Any] = []

    def build_chunk(*args: Any, **kwargs: Any) -> Any:
        built.append(build(*args, **kwargs))
        if len(built) == planner.placement.chunks:
            share_vocabulary(built, planner.last_stage_rank)
        return built[-1]

    return build_chunk


def _build_chunks(stock: Replacement, session: Session) -> Replacement:
    def build_chunks(build_chunk: Any, *args: Any, **kwargs: Any) -> Any:
        build = _placed(build_chunk, session)
        if session.planner is not None and session.shares_vocabulary:
            build = _shared(build, session.planner)
        model = stock(build, *args, **kwargs)
        if session.two_copies:
            tied.start_equal(model)
        return model

    return build_chunks


def _is_pipeline_first_stage(stock: Replacement, session: Session) -> Replacement:
    def is_pipeline_first_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
        if session.stock_is_wrong(ignore_virtual):
            return session.first_and_last(vp_stage)[0]
        return bool(stock(ignore_virtual=ignore_virtual, vp_stage=vp_stage))

    return is_pipeline_first_stage


def _is_pipeline_last_stage(stock: Replacement, session: Session) -> Replacement:
    def is_pipeline_last_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
        if session.stock_is_wrong(ignore_virtual):
            return session.first_and_last(vp_stage)[1]
        return bool(stock(ignore_virtual=ignore_virtual, vp_stage=vp_stage))

    return is_pipeline_last_stage


def _default_embedding_ranks(stock: Replacement, session: Session) -> Replacement:
    def default_embedding_ranks(pp_ranks: list[int]) -> list[int]:
        return [pp_ranks[0]] if session.two_copies else list(stock(pp_ranks))

    return default_embedding_ranks


def _build_data_iterators(stock: Replacement, session: Session) -> Replacement:
    def build_train_valid_test_data_iterators(*args: Any, **kwargs: Any) -> Any:
        found = stock(*args, **kwargs)
        if session.planner is not None and isinstance(session.args.eval_iters, list):
            counts = zip(session.args.eval_iters, session.evaluations or session.args.eval_iters, strict=True)
            session.evaluations = session.args.eval_iters = [max(now or 0, before or 0) for now, before in counts]
        return found

    return build_train_valid_test_data_iterators


def _evaluate_and_print_results(stock: Replacement, session: Session) -> Replacement:
    def evaluate_and_print_results(prefix: Any, step: Any, data_iterator: Any, *rest: Any, **kwargs: Any) -> Any:
        several = session.planner is not None and session.planner.placement.chunks > 1
        if several and session.args.multiple_validation_sets and all(isinstance(each, list) for each in data_iterator):
            data_iterator = [list(chunks) for chunks in zip(*data_iterator, strict=True)]
        return stock(prefix, step, data_iterator, *rest, **kwargs)

    return evaluate_and_print_results


def _compile_helpers(stock: Replacement, session: Session) -> Replacement:
    def compile_helpers() -> None:
        if not came_compiled():
            stock()

    return compile_helpers


HOOKS = (
    Hook(arguments, "parse_args", "our flags, in any script, whatever flags of its own it adds", _parse_args),
    Hook(
        arguments,
        "validate_args",
        "bad requests end before processes meet; chunks and layout are set after stock's validation, which knows only "
        "its own interleaving",
        _validate_args,
    ),
    Hook(
        dataset_utils,
        "compile_helpers",
        "stock compiles its data sets' helpers at every start, and ends where it cannot; the wheel brings them "
        "compiled, without a Makefile",
        _compile_helpers,
    ),
    Hook(
        training,
        "get_forward_backward_func",
        "stock chooses its schedule by pipeline size alone",
        _get_forward_backward_func,
    ),
    Hook(
        training,
        "training_log",
        "the line of an iteration gets what its pipeline came to, and this tells that line from others",
        log_line.training_log,
    ),
    Hook(
        training,
        "print_rank_last",
        "stock's line is made and printed in one function; here it has all of it, and every rank comes by",
        log_line.print_rank_last,
    ),
    Hook(
        RerunStateMachine,
        "validate_result",
        "scripts look for NaN in every microbatch's loss, and reading it waits for the device: here, when all passes "
        "are under way",
        _validate_result,
    ),
    Hook(
        training,
        "get_model",
        "stock puts the output layer on the last rank, and the vocabulary on the two ends (scripts with a model "
        "provider)",
        _build_chunks,
    ),
    Hook(
        dist_utils,
        "build_virtual_pipeline_stages",
        "stock puts the output layer on the last rank, and the vocabulary on the two ends (scripts with a model "
        "configuration)",
        _build_chunks,
    ),
    Hook(
        parallel_state,
        "is_pipeline_first_stage",
        "scripts ask it which data a chunk needs, some without naming the chunk",
        _is_pipeline_first_stage,
    ),
    Hook(
        parallel_state,
        "is_pipeline_last_stage",
        "scripts ask it where the loss and its data are, some without naming the chunk",
        _is_pipeline_last_stage,
    ),
    Hook(
        parallel_state,
        "default_embedding_ranks",
        "with both copies of a tied embedding on one rank there is no group to reduce over",
        _default_embedding_ranks,
    ),
    Hook(
        training,
        "build_train_valid_test_data_iterators",
        "of several validation sets, a chunk without data forgets how long they are",
        _build_data_iterators,
    ),
    Hook(
        training,
        "evaluate_and_print_results",
        "with several chunks stock takes the chunks' lists of validation sets for the sets",
        _evaluate_and_print_results,
    ),
    Hook(
        checkpointing,
        "generate_state_dict",
        "stock keeps the arguments in checkpoints; the layout there is this job's own choice, and an object a process "
        "without this package could not load",
        checkpoints.generate_state_dict,
    ),
    Hook(
        checkpointing,
        "_load_base_checkpoint",
        "stock reads its old format chunk by chunk without a look at the layers in them, and lets names that do not "
        "match go by",
        checkpoints.load_base_checkpoint,
    ),
    Hook(
        fully_parallel,
        "distribute_main_replicas_with_precomputed_distribution",
        "stock shares the writing of a checkpoint out by rank, and a rank with both copies of a tied embedding would "
        "write it twice",
        checkpoints.distribute_main_replicas,
    ),
    Hook(
        fully_parallel,
        "_fill_in_deferred_sharded_items",
        "stock shares the reading out likewise, and would let both copies of a tied embedding have one optimizer state",
        checkpoints.fill_in_deferred_sharded_items,
    ),
)


def install() -> Session:
    """Put every hook in place, for this process. Installing again starts a new session and stacks nothing."""
    session = Session()
    for hook in HOOKS:
        stock = getattr(hook.module, hook.name)
        stock = getattr(stock, "megatron_schedules_stock", stock)
        replacement = functools.wraps(stock)(hook.make(stock, session))
        replacement.megatron_schedules_stock = stock  # type: ignore[attr-defined]
        setattr(hook.module, hook.name, replacement)
    return session
