"""Replacement of names of stock Megatron."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any, NamedTuple

from megatron.schedules.integration.flags.refuse import refuse
from megatron.schedules.integration.session import Session, Stock

_MEGATRON = ("megatron.core", "megatron.training", "megatron.schedules")


class Hook(NamedTuple):
    """One replaced name of stock Megatron.

    Args:
        module: module of the name.
        name: the name.
        why: reason for the replacement.
        call: replacement. It gets the original, the session, and the caller's arguments.
    """

    module: ModuleType | type
    name: str
    why: str
    call: Stock


def put_in(hooks: Iterable[Hook], session: Session) -> None:
    """Puts ``hooks`` in place in this process. A second call replaces the session and does not stack hooks.

    Training loops that imported a name from one of Megatron's modules before get the replacement too. A name that is
    missing ends the process with one line and status 2.
    """
    hooks = list(hooks)
    names = {hook.name for hook in hooks}
    loops: dict[str, list[ModuleType]] = {}
    for path, module in list(sys.modules.items()):
        if not path.startswith(_MEGATRON):
            for name in names.intersection(getattr(module, "__dict__", ())):
                loops.setdefault(name, []).append(module)
    for hook in hooks:
        if not hasattr(hook.module, hook.name):
            refuse(
                f"this megatron-core has no {hook.module.__name__}.{hook.name}, which pipeline schedules replace: use "
                "a version from 0.17 to 0.19"
            )
        stock = _stock(getattr(hook.module, hook.name))
        if stock is None:  # of a library that is not installed
            continue
        replacement = _replacement(hook, stock, session)
        setattr(hook.module, hook.name, replacement)
        for module in loops.get(hook.name, ()):
            if _stock(vars(module)[hook.name]) is stock:
                setattr(module, hook.name, replacement)


def _stock(function: Any) -> Any:
    """Returns the function that ``function`` replaces, or itself."""
    return getattr(function, "megatron_schedules_stock", function)


def _replacement(hook: Hook, stock: Stock, session: Session) -> Stock:
    """Returns a function (or method) that replaces ``stock``."""

    @functools.wraps(stock)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return hook.call(stock, session, *args, **kwargs)

    replacement.megatron_schedules_stock = stock  # type: ignore[attr-defined]
    return replacement
