"""Forms of JSON files that hold a value for each kind of pass, or for each part of a stage's activations."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import UNSET, UnsetType

from megatron.schedules.schedule.kinds import Kind, Share
from megatron.schedules.utils.json_files import Form


class ByKind[Value](Form, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A value for each kind of pass that there is; F, I and W always are."""

    F: Value
    I: Value  # noqa: E741 - the field's letter for the input gradient
    W: Value
    B: Value | UnsetType = UNSET
    S: Value | UnsetType = UNSET
    T: Value | UnsetType = UNSET
    R: Value | UnsetType = UNSET
    O: Value | UnsetType = UNSET  # noqa: E741 - the field's letter for offloading
    L: Value | UnsetType = UNSET

    @staticmethod
    def of(values: Mapping[Kind, Value]) -> ByKind[Value]:
        """``values`` as they are written."""
        return ByKind(**{kind.value: value for kind, value in values.items()})

    def values(self) -> dict[Kind, Value]:
        """Those that are there."""
        return {kind: value for kind in Kind if (value := getattr(self, kind)) is not UNSET}


class ByShare[Value](Form, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A value for each part of a stage's activations."""

    FORWARD: Value
    WEIGHTS: Value
    VOCABULARY: Value
    AGAIN: Value
    AWAY: Value

    @staticmethod
    def of(values: Mapping[Share, Value]) -> ByShare[Value]:
        """``values`` as they are written."""
        return ByShare(**{share.name: value for share, value in values.items()})

    def values(self) -> dict[Share, Value]:
        """All of them."""
        return {share: getattr(self, share.name) for share in Share}
