"""All replacements in stock Megatron, each with its reason. Nothing is replaced anywhere else.

Those in ``megatron.core``, which serve every training loop, are in :mod:`.core_hooks`. Only
:mod:`.linears.fused_accumulation` adds a kernel that is missing.

Without ``--pipeline-schedule`` each replacement only calls the original. The one exception lets jobs start from the
wheel, and is always active.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from megatron.core import utils as core_utils
from megatron.core.datasets import utils as dataset_utils
from megatron.training import arguments, checkpointing, training, utils
from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer
from megatron.training.models import dist_utils

from megatron.schedules.integration import checkpoints, data_iterators
from megatron.schedules.integration.core_hooks import CORE_HOOKS
from megatron.schedules.integration.cpu import standin
from megatron.schedules.integration.dry_run import dry_run
from megatron.schedules.integration.expert_messages import reset_stocks_own
from megatron.schedules.integration.flags.checks import checked, planned, refuse_early
from megatron.schedules.integration.flags.declared import FLAGS, add_arguments, mend_help
from megatron.schedules.integration.gpt_data import masks_documents
from megatron.schedules.integration.gpu_libraries import came_compiled
from megatron.schedules.integration.layers import tied
from megatron.schedules.integration.layers.layout import PlacedLayout
from megatron.schedules.integration.refuse import refuse
from megatron.schedules.integration.session import Hook, Session, Stock, put_in
from megatron.schedules.integration.vocabulary.parts import share_vocabulary
from megatron.schedules.planner.layer_partition import as_layout
from megatron.schedules.runtime.planner import Planner
from megatron.schedules.schedule.placement import Placement


def _parse_args(stock: Stock, session: Session, extra_args_provider: Any = None, *args: Any, **kwargs: Any) -> Any:
    def both(parser: Any) -> Any:
        parser = add_arguments(parser)
        parser.set_defaults(**session.settings)
        parser = parser if extra_args_provider is None else extra_args_provider(parser)
        mend_help(parser)
        # With --yaml-cfg, parsing returns none of our flags.
        refuse_early(sys.argv[1:], parser._option_string_actions, session.arguments)
        return parser

    return stock(both, *args, **kwargs)


def _validate_args(stock: Stock, session: Session, args: Any, *rest: Any, **kwargs: Any) -> Any:
    asked = checked(args) if hasattr(args, "pipeline_schedule") else None
    if asked is None:
        return stock(args, *rest, **kwargs)
    if asked.settings.dry_run is not None:
        dry_run(planned(asked))
    if standin.needed() and not standin.enabled():
        refuse(
            "no CUDA device here, and Megatron requires one: to try it on the CPU call "
            "megatron.schedules.without_gpu() before Megatron is imported (docs/getting-started.md)"
        )
    job = session.plans.job(asked)
    spec, settings, placement = job.spec, job.spec.settings, job.schedule.placement
    if spec.recompute.granularity is None and args.recompute_granularity is not None:
        leave_out_recompute(args)
    if settings.vocabulary_parallel and spec.shape is not None:
        args.padded_vocab_size = spec.shape.vocabulary
    reset_stocks_own(args)
    hybrid = spec.layers.pattern is not None
    if settings.places_layers and job.request.decisions.layers and not hybrid:  # as if the user had given the flag
        args.pipeline_model_parallel_layout = as_layout(job.layers, args.mtp_num_layers or 0)
    result = stock(args, *rest, **kwargs)
    if settings.plan_lengths and args.iterations_to_skip:  # of --result-rejected-tracker-filename: read just now
        refuse(
            f"{FLAGS['plan_lengths']} does not go with --result-rejected-tracker-filename, which names iterations to "
            "skip: samples are read an iteration ahead; leave one of the two out"
        )
    if placement.chunks > 1:
        _set_chunks(args, placement, job.layers)
    session.hybrid_layers = job.layers if hybrid else None
    session.args, session.plan, session.planner = args, job, session.plans.planner(job)
    return result


def leave_out_recompute(args: Any) -> None:
    """Resets the flags of Megatron's own recompute, because the plan does without it."""
    args.recompute_granularity = args.recompute_method = args.recompute_num_layers = args.recompute_modules = None
    args.distribute_saved_activations = False


def _set_chunks(args: Any, placement: Placement, layers: tuple[int, ...]) -> None:
    """Sets the arguments that stock's validation reads for its own interleaving."""
    args.virtual_pipeline_model_parallel_size = placement.chunks
    args.overlap_p2p_comm = args.align_param_gather = False
    args.pipeline_model_parallel_layout = PlacedLayout(placement, layers, args.mtp_num_layers or 0)
    # The layout contains this; stock's configuration allows only one of the two.
    args.account_for_embedding_in_pipeline_split = args.account_for_loss_in_pipeline_split = False
    args.decoder_first_pipeline_num_layers = args.decoder_last_pipeline_num_layers = None


def _placed(build: Stock, session: Session) -> Stock:
    """Wraps ``build`` of one model chunk: adds the embedding and the output layer where the placement puts them."""
    if not session.loss_on_first_rank:
        return build
    takes = inspect.signature(build).parameters

    def build_chunk(*args: Any, **kwargs: Any) -> Any:
        kwargs["pre_process"], kwargs["post_process"] = session.first_and_last(kwargs.get("vp_stage"))
        known = any(p.kind is p.VAR_KEYWORD for p in takes.values())
        return build(*args, **{k: v for k, v in kwargs.items() if known or k in takes})

    return build_chunk


def _shared(build: Stock, planner: Planner) -> Stock:
    """Wraps ``build`` of successive model chunks.

    A rank's last chunk also builds the rank's parts of the vocabulary.
    """
    built: list[Any] = []

    def build_chunk(*args: Any, **kwargs: Any) -> Any:
        built.append(build(*args, **kwargs))
        if len(built) == planner.placement.chunks:
            share_vocabulary(built, planner.last_stage_rank)
        return built[-1]

    return build_chunk


def _build_chunks(stock: Stock, session: Session, build_chunk: Any, *args: Any, **kwargs: Any) -> Any:
    build = _placed(build_chunk, session)
    if session.planner is not None and session.planner.shares_vocabulary:
        build = _shared(build, session.planner)
    model = stock(build, *args, **kwargs)
    if session.two_copies:
        tied.start_equal(model)
    return model


def _masks_documents(session: Session) -> bool:
    """Returns whether the layers of every stage take a mask from their batch, under a schedule of ours."""
    return session.planner is not None and session.args is not None and masks_documents(session.args)


def _is_first_or_last_pipeline_stage(stock: Stock, session: Session, vp_stage: int | None) -> bool:
    return _masks_documents(session) or bool(stock(vp_stage))


def _get_batch_on_this_tp_rank(stock: Stock, session: Session, *args: Any, **kwargs: Any) -> Any:
    if not _masks_documents(session):
        return stock(*args, **kwargs)
    call = inspect.signature(stock).bind(*args, **kwargs)
    call.arguments["mtp_on_this_rank"] = True  # then stock sends everything to any stage
    return stock(*call.args, **call.kwargs)


def _compile_helpers(stock: Stock, session: Session) -> None:
    if not came_compiled():
        stock()


def _training_log(stock: Stock, session: Session, *args: Any, **kwargs: Any) -> Any:
    """Calls stock's function and marks that the line of an iteration is being made."""
    if session.job is None:
        return stock(*args, **kwargs)
    with session.job.log.logging():
        return stock(*args, **kwargs)


def _print_rank_last(stock: Stock, session: Session, message: str) -> None:
    """Calls stock's function and adds the pipeline's figures to an iteration's line.

    Writers and replanning get them too.
    """
    job = session.job
    logged = None if job is None else job.log.logged(job.function.peaks.bytes)
    if job is not None and logged is not None:
        message = "\n".join([message + logged.words(), *logged.warnings()])
        _write_scalars(logged.scalars(), session.iteration())
        if job.replan is not None:
            job.replan.logged(logged)
    stock(message)


def _write_scalars(scalars: Mapping[str, float], iteration: int) -> None:
    """Writes ``scalars`` (values by name) of ``iteration`` on the rank that has writers."""
    board, wandb = get_tensorboard_writer(), get_wandb_writer()
    if board:
        for name, value in scalars.items():
            board.add_scalar(name, value, iteration)
    if wandb:
        wandb.log(dict(scalars), iteration)


HOOKS = (
    Hook(arguments, "parse_args", "our flags, in any script", _parse_args),
    Hook(arguments, "validate_args", "stock's validation knows only its own interleaving", _validate_args),
    Hook(
        dataset_utils,
        "compile_helpers",
        "stock compiles its helpers at every start and ends where it cannot; the wheel brings them compiled",
        _compile_helpers,
    ),
    Hook(training, "training_log", "tells the line of an iteration from other lines", _training_log),
    Hook(training, "print_rank_last", "gets that line when it is complete, on every rank", _print_rank_last),
    Hook(training, "get_model", "stock's places of embedding and output layer (model providers)", _build_chunks),
    Hook(dist_utils, "build_virtual_pipeline_stages", "the same (scripts with a model configuration)", _build_chunks),
    Hook(
        training,
        "build_train_valid_test_data_iterators",
        "a chunk without data forgets how long each of several validation sets is; a user's loader may be in a list",
        data_iterators.build_data_iterators,
    ),
    Hook(
        training,
        "evaluate_and_print_results",
        "with several chunks stock takes the chunks' lists of validation sets for the sets",
        data_iterators.evaluate_and_print_results,
    ),
    Hook(
        training,
        "dummy_train_step",
        "stock skips an iteration by reading from one iterator: not a list of them, nor where a rank reads no data",
        data_iterators.skip_iteration,
    ),
    Hook(
        checkpointing,
        "maybe_save_dataloader_state",
        "stock saves the state of one loader, not of a list",
        data_iterators.save_loader_state,
    ),
    Hook(
        utils,
        "is_first_or_last_pipeline_stage",
        "scripts ask it whether a stage reads data; with a mask that keeps documents apart every stage does",
        _is_first_or_last_pipeline_stage,
    ),
    Hook(
        core_utils if hasattr(core_utils, "get_batch_on_this_tp_rank") else utils,  # by version
        "get_batch_on_this_tp_rank",
        "stock sends no mask to tensor-parallel ranks of a stage in the middle",
        _get_batch_on_this_tp_rank,
    ),
    Hook(
        checkpointing,
        "generate_state_dict",
        "stock saves its arguments; our layout is an object that a process without this package cannot load",
        checkpoints.generate_state_dict,
    ),
    Hook(
        checkpointing,
        "_load_base_checkpoint",
        "stock reads its old format chunk by chunk, whatever layers are in it",
        checkpoints.load_base_checkpoint,
    ),
    *CORE_HOOKS,
)


def install(arguments: Mapping[str, Any] = MappingProxyType({})) -> Session:
    """Installs all hooks in this process. A second call starts a new session and does not stack hooks.

    Args:
        arguments: arguments of :func:`megatron.schedules.install`, by name.
    """
    session = Session(arguments)
    put_in(HOOKS, session)
    return session
