"""A job's own cost profile as JSON: version 2 of what plans read as ``--costs-file``."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from megatron.schedules.planning.job_profile import JobProfile, Measured, StageProfile
from megatron.schedules.planning.kinds import Kind
from megatron.schedules.planning.placement import Placement
from megatron.schedules.planning.profile_facts import MOST_LAYERS, read_facts, read_rates, written_facts

VERSION = 2
# Bytes of a stage, as they are called in the file.
_BYTES = {
    "activation_bytes": "held",
    "weight_bytes": "left",
    "again_bytes": "again",
    "away_bytes": "away",
    "vocabulary_bytes": "vocabulary",
}


def to_text(profile: JobProfile, **about: Any) -> str:
    """The profile as one JSON object; ``about`` goes in too, and nobody reads it."""
    placement = profile.placement
    data = {
        "version": VERSION,
        **written_facts(profile.facts),
        "schedule": profile.schedule,
        "placement": {"name": placement.name, "rank_of": placement.rank_of},
        "microbatches": profile.microbatches,
        "iterations": profile.iterations,
        "replicas": profile.replicas,
        "times_in": "ms",
        "stages": [_written(stage) for stage in profile.stages],
        "hops": profile.hops,
        **({} if profile.copy_gbps is None else {"copy_gbps": profile.copy_gbps._asdict()}),
        **about,
    }
    return json.dumps(data, indent=1) + "\n"


def _written(stage: StageProfile) -> dict[str, Any]:
    return {
        "layers": stage.layers,
        "passes": {kind.value: times._asdict() for kind, times in stage.times.items()},
        "halved": stage.halved,
        "redone": stage.redone,
        **{name: getattr(stage, field) for name, field in _BYTES.items()},
    }


def from_data(data: Mapping[str, Any]) -> JobProfile:
    """Read what :func:`to_text` wrote, parsed; raises KeyError, TypeError and ValueError for anything else."""
    where = data["placement"]
    placement = Placement(str(where["name"]), tuple(map(int, where["rank_of"])))
    first, last = map(int, data["iterations"])
    found = JobProfile(
        read_facts(data),
        str(data["schedule"]),
        placement,
        int(data["microbatches"]),
        (first, last),
        int(data["replicas"]),
        tuple(map(_stage, data["stages"])),
        tuple((int(source), int(to), float(time)) for source, to, time in data["hops"]),
        read_rates(data["copy_gbps"]) if "copy_gbps" in data else None,
    )
    if len(found.stages) != placement.stages or not 1 <= sum(found.layers) == found.facts.layers <= MOST_LAYERS:
        raise ValueError("it must have every stage of its placement, and these all layers of the model")
    if not all(0 <= time < math.inf for _, _, time in found.hops):
        raise ValueError("latencies must be zero or positive")
    return found


def _stage(data: Mapping[str, Any]) -> StageProfile:
    times = {
        Kind(kind): Measured(*(float(each[name]) for name in Measured._fields)) for kind, each in data["passes"].items()
    }
    amounts = {field: float(data[name]) for name, field in _BYTES.items()}
    found = StageProfile(int(data["layers"]), times, bool(data["halved"]), redone=float(data["redone"]), **amounts)
    if not {Kind.F, Kind.I, Kind.W} <= times.keys():
        raise ValueError("each stage must have F, I and W")
    if found.layers < 0 or not 0 <= found.redone <= 1:
        raise ValueError("layers must be zero or more, and those done again a part of them")
    if not all(0 <= each < math.inf for each in (*amounts.values(), *(t for each in times.values() for t in each))):
        raise ValueError("times and bytes must be zero or positive")
    return found
