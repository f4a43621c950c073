"""Whether a vocabulary can be split over all pipeline ranks."""

from __future__ import annotations

from megatron.schedules.job.spec import JobSpec


def indivisible(spec: JobSpec) -> str:
    """What is wrong with a padded vocabulary that was given, by a checkpoint perhaps; empty where it can be split."""
    words = spec.vocabulary
    if words is None or spec.divisible(words) == words:
        return ""
    across = spec.sizes.tensor * spec.sizes.pipeline
    return (
        f"has {words} words as padded, which do not divide by tensor x pipeline parallel = {across}: give --vocab-size "
        "or a tokenizer, and leave out what says the padded size"
    )
