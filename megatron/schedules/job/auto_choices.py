"""What ``auto`` may choose of a job, as its flags leave it open."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatron.schedules.estimate.model_build import StockRecompute
from megatron.schedules.job.checks import validate
from megatron.schedules.job.spec import JobSpec
from megatron.schedules.job.values import MemorySaving
from megatron.schedules.utils.errors import PlanError


def auto_choices(spec: JobSpec) -> Iterator[JobSpec]:
    """Yields the job with all choices that ``auto`` may make, then with fewer, and last as its flags say. All differ.

    Recompute, offload and other layer partitions leave results bitwise equal.
    """
    settings, stock, profile = spec.settings, spec.layers, spec.profile
    placed = settings
    # In training the sizes of a model that is still in a checkpoint may turn out to be others.
    known = spec.model is not None or (spec.knows_layers and not spec.by_megatron)
    if known and settings.layers is None and not (stock.by_hand or any(stock.stand_in)):
        placed = replace(settings, layers="auto")
    choices = [placed, settings]
    if spec.model is not None and settings.saving == MemorySaving() and spec.recompute.granularity != "full":
        choices.insert(0, replace(placed, saving=MemorySaving(recompute=True)))
        if profile is not None and profile.costs(spec.sizes.pipeline).copies.time:
            choices.insert(0, replace(placed, saving=MemorySaving(recompute=True, offload=True)))
    return (
        replace(spec, settings=choice) for choice in dict.fromkeys(choices) if _is_valid(replace(spec, settings=choice))
    )


def without_recompute(spec: JobSpec) -> JobSpec | None:
    """Returns the job without Megatron's own recompute; None if it has none, or has to keep it."""
    profile, granularity = spec.profile, spec.recompute.granularity
    # Times that were measured with recompute do not say how long passes take without it.
    measured_with = profile is not None and profile.facts.recompute is not None
    if granularity is None or spec.model is None or measured_with or (spec.is_built and granularity != "full"):
        return None
    return replace(spec, recompute=StockRecompute())


def _is_valid(spec: JobSpec) -> bool:
    """Returns whether a choice of ``auto`` is compatible with the other flags."""
    try:
        validate(spec)
    except PlanError:
        return False
    return True
