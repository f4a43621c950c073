"""Arguments of a recipe that a schedule does not work with."""

from __future__ import annotations

from dataclasses import replace

from megatron.schedules.integration.flags.check import PlannedJob
from megatron.schedules.integration.flags.incompatible import refusal
from megatron.schedules.job.spec import JobSpec

# Arguments without which a recipe would be another model, or in another precision. All others can be left out.
_KEPT = frozenset(
    (
        "fp4",
        "fp8",
        "fp4_quantizer_factory",
        "hybrid_layer_pattern",
        "kitchen_config_file",
        "kitchen_recipe_number",
        "recompute_granularity",
    )
    + ("sft", "te_precision_config_file", "use_megatron_fsdp", "use_torch_fsdp2", "yaml_cfg")
)


def refused(spec: JobSpec, ours: PlannedJob) -> str:
    """Returns why a recipe is refused, also without all that can be left out; empty if it is accepted.

    Args:
        spec: the recipe's job.
        ours: the same job under our schedule.
    """
    return _why_not(spec, ours, spec.stock.given & _KEPT)


def left_out(spec: JobSpec, ours: PlannedJob) -> dict[str, str]:
    """Returns the arguments that have to be left out, and why.

    Args:
        spec: the recipe's job.
        ours: the same job under our schedule.
    """
    given, kept = spec.stock.given, spec.stock.given & _KEPT
    found = {each: _why_not(spec, ours, kept | {each}) for each in sorted(given - _KEPT)}
    return {each: why for each, why in found.items() if why}


def _why_not(spec: JobSpec, ours: PlannedJob, given: frozenset[str]) -> str:
    return refusal(replace(ours.spec, stock=replace(spec.stock, given=given)), ours.schedule)
