"""Forms of JSON files with a value for each kind of pass, or for each part of a stage's activations.

Their fields are generated from the table of kinds. They are read and written as any other form.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

from msgspec import UNSET, UnsetType, defstruct

from megatron.schedules.schedule.kinds import SPLIT, Kind, Share
from megatron.schedules.utils.json_files import Form

_Value = TypeVar("_Value")


class _ByMember[Key: Enum, Value](Form, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Form with a field for each member of an enumeration, by name."""

    members: ClassVar[type[Enum]]

    @classmethod
    def of(cls, values: Mapping[Key, Value]) -> Self:
        """Returns the form of ``values``."""
        return cls(**{key.name: value for key, value in values.items()})

    def values(self) -> dict[Key, Value]:
        """Returns the values that are set."""
        found: dict[Any, Value] = {key: getattr(self, key.name) for key in self.members}
        return {key: value for key, value in found.items() if value is not UNSET}


def _form(name: str, doc: str, base: Any, members: type[Enum], always: Collection[Enum]) -> Any:
    """Makes the form ``name`` with a field for each of ``members``; those not in ``always`` are optional."""
    fields = [(key.name, _Value) if key in always else (key.name, _Value | UnsetType, UNSET) for key in members]
    namespace = {"members": members, "__doc__": doc, "__orig_bases__": (base,)}
    return defstruct(name, fields, bases=(_ByMember,), namespace=namespace, module=__name__)


if TYPE_CHECKING:

    class ByKind[Value](_ByMember[Kind, Value], frozen=True): ...

    class ByShare[Value](_ByMember[Share, Value], frozen=True): ...

else:
    _KINDS = "A value for each kind of pass that there is; F, I and W always are."
    ByKind = _form("ByKind", _KINDS, _ByMember[Kind, _Value], Kind, SPLIT)
    _SHARES = "A value for each part of a stage's activations."
    ByShare = _form("ByShare", _SHARES, _ByMember[Share, _Value], Share, Share)
