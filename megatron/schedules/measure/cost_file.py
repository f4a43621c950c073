"""Cost files: profiles that a job or ``tools/profile_passes.py`` measured, and costs written by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from megatron.schedules.measure.job_profile import JobProfile
from megatron.schedules.measure.job_profile_json import VERSION, from_text
from megatron.schedules.schedule.cost_parts import MOST_SHARE, HostCopies, LayerTimes, Link, MemoryShares
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.json_files import Amount, Form, Positive, check_version, decode, read_file

_CUSTOM = 3
_GONE = {1: "a profile of one chunk"}


class CustomCosts(Form, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Cost file written by hand, see docs/measure.md; every field but the version may be left out.

    Args:
        version: tells such files from measured ones.
        forward, input_grad, weight_grad: time over half a rank's layers, in any unit; all three or none.
        latency: of a message between ranks, in the same unit.
        messages: parts of forward and of input_grad in which a rank waits for messages of its experts.
        weight_share: activation memory that an input gradient leaves to its weight gradient.
        copy_time: to copy the activations of half a rank's layers one way.
        one_way: whether a rank copies in one direction at a time.
    """

    version: Literal[3]
    forward: Positive | None = None
    input_grad: Positive | None = None
    weight_grad: Positive | None = None
    latency: Amount | None = None
    messages: tuple[Amount, Amount] | None = None
    weight_share: Annotated[float, Meta(ge=0, le=MOST_SHARE)] | None = None
    copy_time: Positive | None = None
    one_way: bool = False

    @property
    def times(self) -> Costs | None:
        """F, I, W, latency and messages; None where the file does not have them."""
        if self.forward is None or self.input_grad is None or self.weight_grad is None:
            return None
        times = LayerTimes(self.forward, self.input_grad, self.weight_grad, self.messages or (0.0, 0.0))
        return Costs(times, link=Link(self.latency or 0.0))

    @property
    def of_memory(self) -> tuple[str, ...]:
        """Fields in the file about memory, which a model's sizes determine too."""
        return () if self.weight_share is None else ("weight_share",)

    def added_to(self, costs: Costs) -> Costs:
        """Adds the fields other than times to ``costs``. A share of memory replaces a model's bytes."""
        return replace(
            costs,
            copies=HostCopies(self.copy_time or costs.copies.time, self.one_way),
            memory=costs.memory if self.weight_share is None else MemoryShares(self.weight_share),
        )


def read_custom(text: str) -> CustomCosts:
    """Reads :class:`CustomCosts`; raises :class:`.PlanError`, which begins with the field."""
    custom = decode(text, CustomCosts)
    named = [name for name in ("forward", "input_grad", "weight_grad") if getattr(custom, name) is not None]
    if named and len(named) < 3:
        raise PlanError(f"$ has {' and '.join(named)}: give forward, input_grad and weight_grad together")
    for name in ("latency", "messages"):
        if getattr(custom, name) is not None and not named:
            raise PlanError(f"$.{name} goes with forward, input_grad and weight_grad, which are missing")
    if custom.one_way and custom.copy_time is None:
        raise PlanError("$.one_way goes with copy_time, which is missing")
    custom.added_to(custom.times or Costs())  # reject costs that cannot be planned with
    return custom


_WRITERS = "--pipeline-measure and tools/profile_passes.py write such files"


def read_profile(path: Path) -> JobProfile:
    """Reads a measured cost file.

    Raises:
        PlanError: what is wrong with the file.
    """
    return read_file(path, "costs_file", "cost profile", _WRITERS, _profile)


def read_costs(path: Path) -> JobProfile | CustomCosts:
    """Reads a cost file: a profile, or costs written by hand.

    Raises:
        PlanError: what is wrong with the file.
    """
    return read_file(path, "costs_file", "cost file", f"{_WRITERS}; docs/measure.md has those written by hand", _costs)


def _costs(text: str) -> JobProfile | CustomCosts:
    return read_custom(text) if check_version(text, VERSION, _CUSTOM, gone=_GONE) == _CUSTOM else _profile(text)


def _profile(text: str) -> JobProfile:
    check_version(text, VERSION, gone=_GONE)
    profile = from_text(text)
    profile.costs(1)  # reject costs that cannot be planned with
    return profile
