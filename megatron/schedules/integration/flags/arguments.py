"""Reads Megatron's arguments: the job for planning and checks, and what training reads when it begins."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from megatron.schedules.estimate import megatron_flags
from megatron.schedules.estimate.build_flags import as_built, graphs_impl, numbers, stand_in, stock_recompute
from megatron.schedules.estimate.layer_pattern import hybrid_layers
from megatron.schedules.estimate.parallel_sizes import sizes_of
from megatron.schedules.integration.environment import assumed_gpus
from megatron.schedules.integration.flags.declared import FLAGS, OURS
from megatron.schedules.integration.layers.model_shape import shape_of
from megatron.schedules.job import values
from megatron.schedules.job.spec import Batch, JobModel, JobSpec, Settings, StockFlags, StockLayers
from megatron.schedules.measure.profile_facts import Facts
from megatron.schedules.planner.registry import WRITTEN, check_parts
from megatron.schedules.utils.errors import PlanError


def spec_of(args: Any, *, is_built: bool = False) -> JobSpec:
    """Returns the job in ``args``, which must have a schedule. Model and files are read later by :func:`completed`.

    Args:
        args: Megatron's arguments.
        is_built: whether the model is built already.

    Raises:
        PlanError: a flag cannot be read; the error names it.
    """
    settings = settings_of(args)
    dry_run = settings.dry_run
    world = args.world_size if dry_run is None else assumed_gpus(sizes_of(args), dry_run.gpus)[0]
    return JobSpec(
        settings,
        sizes_of(args, world),
        Batch(args.micro_batch_size, args.global_batch_size, args.step_batch_size_schedule),
        _stock_layers(args),
        stock_recompute(args),
        getattr(args, "padded_vocab_size", None),
        args.make_vocab_size_divisible_by,
        iterations=getattr(args, "train_iters", None),
        hides_messages=bool(args.overlap_moe_expert_parallel_comm),
        is_built=is_built,
        stock=_stock_flags(args),
        flags=FLAGS,
    )


def completed(spec: JobSpec, args: Any) -> JobSpec:
    """Returns ``spec`` with its CSV, its cost file and the model in ``args``.

    Raises:
        PlanError: a flag or file cannot be read; the error names it.
        TooEarlyError: the vocabulary size comes from a tokenizer, which Megatron builds.
    """
    shape = shape_of(args)
    return replace(spec.read(), model=None if shape is None else JobModel(as_built(args, shape), numbers(args)))


def check_unscheduled(args: Any) -> None:
    """Refuses flags of ours in ``args`` if no schedule is given."""
    limit = values.memory_limit(FLAGS["memory_limit"], args.pipeline_memory_limit)
    saving = values.memory_saving(FLAGS["save_memory"], args.pipeline_save_memory)
    given = {"memory_limit": limit is not None, "recompute": saving.recompute, "offload": saving.offload}
    check_parts([part for part, is_given in given.items() if is_given], [], FLAGS)
    for flag in OURS:
        if getattr(args, megatron_flags.attribute(flag)) not in (None, False, "none"):
            raise PlanError(f"{flag} goes with {FLAGS['schedule']}: name one of {', '.join(WRITTEN)}")


def _stock_layers(args: Any) -> StockLayers:
    count, ahead, hybrid = args.num_layers, args.mtp_num_layers or 0, hybrid_layers(args)
    if hybrid is not None:  # as in stock, it says how many layers there are
        count, ahead = len(hybrid.layers), ahead or len(hybrid.ahead)
    return StockLayers(
        count,
        args.decoder_first_pipeline_num_layers,
        args.decoder_last_pipeline_num_layers,
        args.pipeline_model_parallel_layout,
        stand_in(args),
        ahead,
        None if hybrid is None else hybrid.pattern,
    )


# Words that switch single flags off. A file, elsewhere, may be called none.
_OFF = {"cuda_graph_impl": "none"}


def _stock_flags(args: Any) -> StockFlags:
    return StockFlags(
        frozenset(name for name, value in vars(args).items() if value not in (None, False, 0, [], [0], _OFF.get(name))),
        args.transformer_impl,
        args.ckpt_format,
        args.dataloader_type,
        str(getattr(args, "fp8_recipe", None) or "delayed") if getattr(args, "fp8", None) else "",
        graphs_impl(args),
    )


def settings_of(args: Any) -> Settings:
    """Reads our own flags.

    Raises:
        PlanError: a flag cannot be read; the error names it.
    """
    return Settings(
        values.schedule_choice(FLAGS["schedule"], args.pipeline_schedule),
        values.memory_limit(FLAGS["memory_limit"], args.pipeline_memory_limit),
        values.costs_choice(FLAGS["costs"], args.pipeline_costs),
        values.layers_choice(FLAGS["layers"], args.pipeline_layers),
        values.memory_saving(FLAGS["save_memory"], args.pipeline_save_memory),
        args.pipeline_vocabulary_parallel,
        args.pipeline_plan_lengths,
        values.measuring(FLAGS["measure"], args.pipeline_measure),
        args.pipeline_replan,
        args.pipeline_verify,
        values.dry_run(FLAGS["dry_run"], args.pipeline_dry_run),
        values.search_seconds(),
        values.stall_seconds(),
    )


class GroupFlags(NamedTuple):
    """Settings of process groups.

    Args:
        timeout: value of ``--distributed-timeout-minutes``.
        nccl_file: value of ``--nccl-communicator-config-path``.
        high_priority: whether ``pp`` is among ``--high-priority-stream-groups``.
    """

    timeout: timedelta
    nccl_file: Path | None = None
    high_priority: bool = False


class RunFlags(NamedTuple):
    """Settings that a job reads when its training begins.

    Args:
        groups: settings of process groups.
        model: sizes of the model and of its parallelism, for a cost profile.
        log_interval: Megatron logs every this many iterations.
        profiles: whether Megatron's ``--profile`` is given.
        begun: iterations already done.
        train_iters: iterations of the whole training.
        end: last iteration of this run.
    """

    groups: GroupFlags
    model: Facts
    log_interval: int
    profiles: bool
    begun: int
    train_iters: int
    end: int


def run_flags(args: Any) -> RunFlags:
    """Reads Megatron's validated arguments."""
    begun, whole, interval = args.iteration, args.train_iters or 0, args.exit_interval
    end = min(whole, (begun // interval + 1) * interval) if interval else whole
    return RunFlags(group_flags(args), model_facts(args), args.log_interval, bool(args.profile), begun, whole, end)


def group_flags(args: Any) -> GroupFlags:
    """Reads the settings of process groups."""
    path = args.nccl_communicator_config_path
    return GroupFlags(
        timedelta(minutes=args.distributed_timeout_minutes),
        None if path is None else Path(path),
        "pp" in (args.high_priority_stream_groups or ()),
    )


def model_facts(args: Any) -> Facts:
    """Reads the model and its parallel sizes for a cost profile; the device is not known here."""
    return Facts(
        device="",
        layers=args.num_layers,
        hidden_size=args.hidden_size,
        heads=args.num_attention_heads,
        sequence_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        tensor_parallel=args.tensor_model_parallel_size,
        context_parallel=args.context_parallel_size,
        vocabulary=args.padded_vocab_size or 0,
        dtype="bf16" if args.bf16 else "fp16" if args.fp16 else "fp32",
        recompute=args.recompute_granularity,
    )
