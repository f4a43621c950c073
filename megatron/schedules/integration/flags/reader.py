"""Reads a job from Megatron's arguments, the one place that does so for planning and checks."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Any

from megatron.schedules.estimate import megatron_flags
from megatron.schedules.estimate.model_build import as_built, expert_tensor, numbers, stock_recompute
from megatron.schedules.integration.flags.declared import FLAGS, OURS
from megatron.schedules.integration.flags.dry_run_machine import assumed_gpus
from megatron.schedules.integration.layers.arithmetic import shape_of
from megatron.schedules.job import values
from megatron.schedules.job.settings import Settings
from megatron.schedules.job.spec import Batch, JobSpec, Model, Sizes, StockLayers
from megatron.schedules.planner.registry import NAMES, check_parts
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.parsing import read_text


def spec_of(args: Any) -> JobSpec:
    """The job in ``args``, which ask for a schedule; model and CSV are not read yet, see :func:`completed`.

    Raises:
        PlanError: naming the flag that cannot be read.
    """
    settings = _settings(args)
    sizes = Sizes(
        world=0,
        pipeline=args.pipeline_model_parallel_size,
        tensor=args.tensor_model_parallel_size,
        context=args.context_parallel_size,
        expert=args.expert_model_parallel_size,
        expert_tensor=expert_tensor(args),
        has_experts=bool(args.num_experts),
        optimizer_instances=args.num_distributed_optimizer_instances if args.use_distributed_optimizer else 0,
    )
    dry_run = settings.dry_run
    world = args.world_size if dry_run is None else assumed_gpus(sizes, dry_run.gpus)[0]
    stand_in = bool(args.account_for_embedding_in_pipeline_split), bool(args.account_for_loss_in_pipeline_split)
    return JobSpec(
        settings,
        replace(sizes, world=world),
        Batch(args.micro_batch_size, args.global_batch_size, args.step_batch_size_schedule),
        StockLayers(
            args.num_layers,
            args.decoder_first_pipeline_num_layers,
            args.decoder_last_pipeline_num_layers,
            args.pipeline_model_parallel_layout,
            stand_in,
            args.mtp_num_layers or 0,
        ),
        stock_recompute(args),
        getattr(args, "padded_vocab_size", None),
        args.make_vocab_size_divisible_by,
        iterations=getattr(args, "train_iters", None),
        stock=MappingProxyType(dict(vars(args))),
    )


def completed(spec: JobSpec, args: Any) -> JobSpec:
    """``spec`` with its CSV and the model in ``args``.

    Raises:
        PlanError: naming the flag or file that cannot be read.
        TooEarlyError: where the vocabulary is that of a tokenizer, which Megatron builds.
    """
    file = spec.settings.schedule.file
    csv, shape = None if file is None else read_text(file, "csv"), shape_of(args)
    model = None if shape is None else Model(shape, as_built(args, shape), numbers(args))
    return replace(spec, csv=csv, model=model)


def check_unscheduled(args: Any) -> None:
    """Refuse flags of ours in ``args`` where no schedule is asked for."""
    limit = values.memory_limit(FLAGS["memory_limit"], args.pipeline_memory_limit)
    saving = values.memory_saving(FLAGS["save_memory"], args.pipeline_save_memory)
    given = {"memory_limit": limit is not None, "again": saving.recompute, "offload": saving.offload}
    check_parts([part for part, is_given in given.items() if is_given], [], FLAGS)
    for flag in OURS:
        if getattr(args, megatron_flags.attribute(flag)) not in (None, False, "none"):
            raise PlanError(f"{flag} goes with {FLAGS['schedule']}: name one of {', '.join(NAMES)}")


def _settings(args: Any) -> Settings:
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
        values.dry_run(FLAGS["dry_run"], args.pipeline_dry_run),
        values.search_seconds(),
        values.stall_seconds(),
    )
