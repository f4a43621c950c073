"""Arguments of a recipe that a schedule does not work with."""

from __future__ import annotations

from dataclasses import replace

from megatron.schedules.job.plan_job import JobPlan
from megatron.schedules.job.rules import refusal
from megatron.schedules.job.spec import JobSpec
from megatron.schedules.utils.errors import PlanError

# Arguments without which a recipe would be another model, or in another precision. All others can be left out.
_KEPT = frozenset(
    (
        "fp4",
        "fp8",
        "fp4_quantizer_factory",
        "hybrid_layer_pattern",
        "kitchen_config_file",
        "kitchen_recipe_number",
        "num_experts",
        "recompute_granularity",
    )
    + ("sft", "te_precision_config_file", "use_megatron_fsdp", "use_torch_fsdp2", "yaml_cfg")
)


def refused(spec: JobSpec, ours: JobPlan) -> str:
    """Returns why a recipe is refused, also without all that can be left out; empty if it is accepted.

    Args:
        spec: the recipe's job.
        ours: the same job under our schedule.
    """
    return _why_not(spec, ours, spec.stock.given & _KEPT)


def left_out(spec: JobSpec, ours: JobPlan) -> dict[str, str]:
    """Returns the arguments that have to be left out, and why.

    Args:
        spec: the recipe's job.
        ours: the same job under our schedule.

    Raises:
        PlanError: all arguments together are refused, and leaving out no single one helps.
    """
    given, kept = spec.stock.given, spec.stock.given & _KEPT
    alone = {each: _why_not(spec, ours, kept | {each}) for each in sorted(given - _KEPT)}
    found = {each: why for each, why in alone.items() if why}
    # The others may not go together. One of them is then left out, if possible the one that the reason names first.
    while why := _why_not(spec, ours, given - found.keys()):
        others = sorted(given - _KEPT - found.keys())
        helping = [each for each in others if _why_not(spec, ours, given - found.keys() - {each}) != why]
        if not helping:
            raise PlanError(f"cannot say what to leave out: {why}")
        named = [each for each in helping if f"work with --{each.replace('_', '-')}:" in why]
        found[(named or helping)[0]] = why
    return found


def _why_not(spec: JobSpec, ours: JobPlan, given: frozenset[str]) -> str:
    return refusal(replace(ours.spec, stock=replace(spec.stock, given=given)), ours.schedule)
