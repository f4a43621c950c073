"""Measured cost profiles as JSON."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, UnsetType

from megatron.schedules.measure.job_profile import JobProfile, Measured, StageProfile
from megatron.schedules.measure.profile_facts import MOST_LAYERS, CopyRates, FactsForm, written_facts
from megatron.schedules.schedule.costs_json import ByKind
from megatron.schedules.schedule.kinds import Kind, Share
from megatron.schedules.schedule.text_forms import PlacementForm
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.json_files import (
    Amount,
    Count,
    Form,
    Index,
    LinkLatency,
    Name,
    Portion,
    check_length,
    decode,
    encode,
    read_latencies,
)

VERSION = 2

# The field of each part of a stage's activations.
_BYTES = {
    Share.WEIGHTS: "weight_bytes",
    Share.VOCABULARY: "vocabulary_bytes",
    Share.RECOMPUTED: "recompute_bytes",
    Share.OFFLOADED: "offload_bytes",
}


class MessageTimesForm(Form, frozen=True, kw_only=True):
    """Milliseconds in which F and I wait for messages of experts if nothing runs behind them."""

    F: Amount
    I: Amount  # noqa: E741 - the field's letter for the input gradient


class StageForm(Form, frozen=True, kw_only=True):
    """:class:`.StageProfile` in the file."""

    layers: Annotated[int, Meta(ge=0, le=MOST_LAYERS)]
    passes: ByKind[Measured]
    halved: bool
    recomputed: Portion
    activation_bytes: Amount
    weight_bytes: Amount
    recompute_bytes: Amount
    offload_bytes: Amount
    vocabulary_bytes: Amount
    messages: MessageTimesForm | UnsetType = UNSET

    @staticmethod
    def of(stage: StageProfile) -> StageForm:
        """Converts ``stage`` for the file."""
        return StageForm(
            layers=stage.layers,
            passes=ByKind.of(stage.times),
            halved=stage.halved,
            recomputed=stage.recomputed,
            activation_bytes=stage.held,
            **{name: stage.sizes[share] for share, name in _BYTES.items()},
            messages=MessageTimesForm(F=stage.messages.get(Kind.F, 0.0), I=stage.messages.get(Kind.I, 0.0))
            if stage.messages
            else UNSET,
        )

    def stage(self) -> StageProfile:
        """Converts to :class:`.StageProfile`."""
        return StageProfile(
            self.layers,
            self.passes.values(),
            self.halved,
            held=self.activation_bytes,
            sizes={share: getattr(self, name) for share, name in _BYTES.items()},
            recomputed=self.recomputed,
            messages={} if self.messages is UNSET else {Kind.F: self.messages.F, Kind.I: self.messages.I},
        )


class JobProfileForm(FactsForm, frozen=True, kw_only=True):
    """:class:`.JobProfile` in the file."""

    schedule: Name
    placement: PlacementForm
    microbatches: Count
    iterations: tuple[Index, Index]
    replicas: Count
    times_in: Literal["ms"] = "ms"
    stages: tuple[StageForm, ...]
    latencies: tuple[LinkLatency, ...]
    copy_gbps: CopyRates | UnsetType = UNSET
    messages_exposed: Portion | UnsetType = UNSET


def to_text(profile: JobProfile, *, versions: Any = UNSET, date: Any = UNSET) -> str:
    """Writes the profile as one JSON object; ``versions`` of packages and ``date`` are for human readers."""
    rates = profile.copy_gbps
    form = JobProfileForm(
        version=VERSION,
        **written_facts(profile.facts),
        schedule=profile.schedule,
        placement=PlacementForm.of(profile.placement),
        microbatches=profile.microbatches,
        iterations=profile.iterations,
        replicas=profile.replicas,
        stages=tuple(map(StageForm.of, profile.stages)),
        latencies=profile.latencies,
        copy_gbps=UNSET if rates is None else rates,
        messages_exposed=UNSET if profile.exposed is None else profile.exposed,
        versions=versions,
        date=date,
    )
    return encode(form, indent=1) + "\n"


def from_text(text: str) -> JobProfile:
    """Reads what :func:`to_text` wrote; raises :class:`.PlanError`, which begins with the field, for anything else."""
    form = decode(text, JobProfileForm)
    placement = form.placement.placement("$.placement")
    check_length(form.stages, placement.stages, "$.stages", "stage of the placement")
    profile = JobProfile(
        form.facts(),
        form.schedule,
        placement,
        form.microbatches,
        form.iterations,
        form.replicas,
        tuple(stage.stage() for stage in form.stages),
        form.latencies,
        None if form.copy_gbps is UNSET else form.copy_gbps,
        None if form.messages_exposed is UNSET else form.messages_exposed,
    )
    if sum(profile.layers) != profile.facts.layers:
        raise PlanError(f"$.stages have {sum(profile.layers)} layers, and $.model.layers is {profile.facts.layers}")
    if not profile.iterations[0] <= profile.iterations[1]:
        raise PlanError("$.iterations must be the first and the last one that were timed")
    read_latencies(form.latencies, placement.ranks, "$.latencies")
    return profile
