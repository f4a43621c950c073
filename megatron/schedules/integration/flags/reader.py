"""Conversion of Megatron's arguments to a job, the only one for planning and checks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.schedules.estimate import megatron_flags
from megatron.schedules.estimate.build_flags import as_built, numbers, stand_in, stock_recompute
from megatron.schedules.estimate.parallel_sizes import sizes_of
from megatron.schedules.integration.flags.declared import FLAGS, OURS
from megatron.schedules.integration.flags.dry_run_machine import assumed_gpus
from megatron.schedules.integration.layers.model_shape import hybrid_pattern, shape_of
from megatron.schedules.job import values
from megatron.schedules.job.spec import Batch, JobSpec, Model, Settings, StockFlags, StockLayers
from megatron.schedules.planner.registry import CHOICES, check_parts
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
    return replace(spec.read(), model=None if shape is None else Model(as_built(args, shape), numbers(args)))


def check_unscheduled(args: Any) -> None:
    """Refuses flags of ours in ``args`` if no schedule is given."""
    limit = values.memory_limit(FLAGS["memory_limit"], args.pipeline_memory_limit)
    saving = values.memory_saving(FLAGS["save_memory"], args.pipeline_save_memory)
    given = {"memory_limit": limit is not None, "recompute": saving.recompute, "offload": saving.offload}
    check_parts([part for part, is_given in given.items() if is_given], [], FLAGS)
    for flag in OURS:
        if getattr(args, megatron_flags.attribute(flag)) not in (None, False, "none"):
            raise PlanError(f"{flag} goes with {FLAGS['schedule']}: name one of {', '.join(CHOICES)}")


def _stock_layers(args: Any) -> StockLayers:
    count, ahead, pattern = args.num_layers, args.mtp_num_layers or 0, hybrid_pattern(args)
    if pattern is not None:  # as in stock, it says how many layers there are
        pattern, *predicting = pattern.split("/")
        count, ahead = len(pattern.replace("|", "")), ahead or len(predicting)
    return StockLayers(
        count,
        args.decoder_first_pipeline_num_layers,
        args.decoder_last_pipeline_num_layers,
        args.pipeline_model_parallel_layout,
        stand_in(args),
        ahead,
        pattern,
    )


# Words that switch single flags off. A file, elsewhere, may be called none.
_OFF = {"cuda_graph_impl": "none"}


def _stock_flags(args: Any) -> StockFlags:
    return StockFlags(
        frozenset(name for name, value in vars(args).items() if value not in (None, False, 0, [], _OFF.get(name))),
        args.transformer_impl,
        args.ckpt_format,
        args.dataloader_type,
        str(getattr(args, "fp8_recipe", None) or "delayed") if getattr(args, "fp8", None) else "",
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
