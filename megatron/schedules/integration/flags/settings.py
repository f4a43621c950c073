"""Reads this package's flags from Megatron's arguments."""

from __future__ import annotations

from typing import Any

from megatron.schedules.estimate import megatron_flags
from megatron.schedules.integration.flags.declared import FLAGS, OURS
from megatron.schedules.job import values
from megatron.schedules.job.settings import Settings
from megatron.schedules.planner.registry import NAMES, check_parts
from megatron.schedules.utils.errors import PlanError


def settings_of(args: Any) -> Settings:
    """The settings in ``args``, which ask for a schedule.

    Raises:
        PlanError: naming the flag that cannot be read.
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
        values.dry_run(FLAGS["dry_run"], args.pipeline_dry_run),
        values.search_seconds(),
        values.stall_seconds(),
    )


def check_unscheduled(args: Any) -> None:
    """Refuse flags of ours in ``args`` where no schedule is asked for."""
    limit = values.memory_limit(FLAGS["memory_limit"], args.pipeline_memory_limit)
    saving = values.memory_saving(FLAGS["save_memory"], args.pipeline_save_memory)
    given = {"memory_limit": limit is not None, "again": saving.recompute, "offload": saving.offload}
    check_parts([part for part, is_given in given.items() if is_given], [], FLAGS)
    for flag in OURS:
        if getattr(args, megatron_flags.attribute(flag)) not in (None, False, "none"):
            raise PlanError(f"{flag} goes with {FLAGS['schedule']}: name one of {', '.join(NAMES)}")
