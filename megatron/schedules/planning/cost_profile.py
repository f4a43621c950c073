"""Cost profiles: what a chunk's passes were measured to take and hold, as ``tools/profile_passes.py`` writes them.

:func:`read_profile` also reads those that a job writes of itself, see :mod:`.job_profile`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron.schedules.planning.costs import Costs
from megatron.schedules.planning.errors import PlanError
from megatron.schedules.planning.given import read_text
from megatron.schedules.planning.job_profile_text import VERSION, from_data
from megatron.schedules.planning.loads import Load, ModelLoads, Part
from megatron.schedules.planning.model_memory import ModelMemory
from megatron.schedules.planning.profile_facts import (
    MOST_LAYERS,
    CopyRates,
    Facts,
    Profile,
    copy_time,
    read_facts,
    read_rates,
)

_PASSES = ("forward", "input_grad", "weight_grad")


@dataclass(frozen=True)
class CostProfile:
    """One chunk of decoder layers, measured on one device.

    Args:
        facts: the model, and what it was measured on.
        layers: of the chunk.
        seconds: median times of the chunk's F, I and W.
        activation_bytes: held from F until I.
        weight_bytes: those of them held on until W.
        ends: the embedding, and the output layer with its loss; None in profiles without them.
        copy_gbps: how fast activations go to the host and come back; None in profiles without it.
        again: how long the chunk's forward takes where it is done again, against F, and what F leaves to it, against
            ``activation_bytes``; None in profiles without it.
    """

    facts: Facts
    layers: int
    seconds: tuple[float, float, float]
    activation_bytes: float
    weight_bytes: float
    ends: tuple[Load, Load] | None = None
    copy_gbps: CopyRates | None = None
    again: tuple[float, float] | None = None

    @property
    def layer_seconds(self) -> tuple[float, float, float]:
        """F, I and W of one layer."""
        forward, input_grad, weight_grad = (each / self.layers for each in self.seconds)
        return forward, input_grad, weight_grad

    @property
    def layer_bytes(self) -> float:
        """See :class:`.profile_facts.Profile`."""
        return self.activation_bytes / self.layers

    @property
    def model(self) -> ModelLoads | None:
        """Layers and ends as they were measured; None without ends."""
        if self.ends is None:
            return None
        first, last = (Part(whole=end) for end in self.ends)
        layer = Part(split=Load(*self.layer_seconds, self.layer_bytes))
        # What is kept in single precision takes half of that where all ranks share it.
        return ModelLoads(first, (layer,) * self.facts.layers, last, kept_for_output=(0.0, last.held / 2))

    def copy_time(self, ranks: int, *, both_ways: bool = True) -> float | None:
        """Milliseconds for what half a rank's layers hold from F until I, one way; None where it was not measured.

        By the slower way; ``both_ways`` says that the other one is busy too.
        """
        held = self.layer_bytes * self.facts.layers / (2 * ranks)
        return copy_time(self.copy_gbps, held, both_ways=both_ways)

    def costs(self, ranks: int) -> Costs:
        """In milliseconds, for a pipeline of so many ranks; P2P latency is zero, as no pipeline was measured.

        What copies take is there where it was measured, with both directions busy, and counts where plans offload.
        """
        scale = 1e3 * self.facts.layers / (2 * ranks)
        forward, input_grad, weight_grad = (scale * each for each in self.layer_seconds)
        share = self.weight_bytes / self.activation_bytes if self.activation_bytes else 1.0
        costs = Costs(
            forward, input_grad, weight_grad, weight_share=share, model=self.model, copy=self.copy_time(ranks) or 0.0
        )
        if self.again is None:
            return costs
        again, layer_input = self.again
        return replace(costs, again=again, layer_input=layer_input)

    def memory(self, planned: ModelMemory) -> ModelMemory:
        """See :class:`.profile_facts.Profile`."""
        if not self.layer_bytes:
            return planned
        return planned.measured(
            (self.layer_bytes,) * len(planned.layers),
            self.weight_bytes / self.activation_bytes,
            None if self.again is None else self.again[1] * self.layer_bytes,
            None if self.ends is None else (self.ends[0].held, self.ends[1].held),
            recomputed=self.facts.recompute is not None,
        )


def read_profile(path: Path) -> Profile:
    """The profile in the JSON file ``path``: of one chunk, or of a whole job.

    Raises:
        PlanError: in one line, what is wrong with the file.
    """
    text, writer = read_text(path, "costs_file"), "tools/profile_passes.py and --pipeline-save-costs write such files"
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):  # numbers may be too long for Python, and lists too deep
        raise PlanError(f"{path} is no JSON; {writer}", "costs_file") from None
    try:
        found: Profile = from_data(data) if "version" in data and data["version"] == VERSION else _profile(data)
        found.costs(1)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        what = f"lacks {error.args[0]!r}" if isinstance(error, KeyError) else f"holds something else: {error}"
        raise PlanError(f"{path} is no cost profile: it {what}; {writer}", "costs_file") from None
    return found


def _profile(data: Mapping[str, Any]) -> CostProfile:
    if "version" in data and data["version"] != 1:
        raise ValueError(f"version {data['version']}, and 1 or {VERSION} is read here")
    _, chunk, _ = data["model"], data["chunk"], data["version"]
    facts = read_facts(data)
    forward, input_grad, weight_grad = _seconds(chunk)
    found = CostProfile(
        facts=facts,
        layers=int(chunk["layers"]),
        seconds=(forward, input_grad, weight_grad),
        activation_bytes=float(chunk["activation_bytes"]),
        weight_bytes=float(chunk["weight_bytes"]),
        ends=(_end(data["embedding"]), _end(data["output_layer"])) if "output_layer" in data else None,
        copy_gbps=read_rates(data["copy_gbps"]) if "copy_gbps" in data else None,
        again=_again(chunk) if "again" in chunk else None,
    )
    if min(found.seconds) <= 0 or not 1 <= found.layers <= facts.layers <= MOST_LAYERS:
        raise ValueError("times and layers must be positive, and a chunk's layers a part of the model's")
    if not all(0 <= held < math.inf for held in (found.activation_bytes, found.weight_bytes)):
        raise ValueError("bytes must be zero or positive")
    return found


def _seconds(measured: Mapping[str, Any]) -> tuple[float, float, float]:
    forward, input_grad, weight_grad = (float(measured[name]["median"]) for name in _PASSES)
    return forward, input_grad, weight_grad


def _end(measured: Mapping[str, Any]) -> Load:
    found = Load(*_seconds(measured), float(measured["activation_bytes"]))
    if not all(0 <= each < math.inf for each in found):
        raise ValueError("times and bytes of the ends must be zero or positive")
    return found


def _again(chunk: Mapping[str, Any]) -> tuple[float, float]:
    again = float(chunk["again"]["median"]) / float(chunk["forward"]["median"])
    left = float(chunk["input_bytes"]) / max(1.0, float(chunk["activation_bytes"]))
    if not (0 < again < math.inf and 0 <= left <= 1):
        raise ValueError("a forward done again must take time, and leave no more than a forward holds")
    return again, left
