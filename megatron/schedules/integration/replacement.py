"""Replacement of names of stock Megatron."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from types import ModuleType
from typing import Any, NamedTuple

from megatron.schedules.integration.flags.refuse import refuse
from megatron.schedules.integration.session import Session, Stock


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

    A name that is missing ends the process with one line and status 2.
    """
    for hook in hooks:
        if not hasattr(hook.module, hook.name):
            refuse(
                f"this megatron-core has no {hook.module.__name__}.{hook.name}, which pipeline schedules replace: use "
                "a version from 0.17 to 0.19"
            )
        stock = getattr(hook.module, hook.name)
        if stock is None:  # of a library that is not installed
            continue
        stock = getattr(stock, "megatron_schedules_stock", stock)
        setattr(hook.module, hook.name, _replacement(hook, stock, session))


def _replacement(hook: Hook, stock: Stock, session: Session) -> Stock:
    """Returns a function (or method) that replaces ``stock``."""

    @functools.wraps(stock)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return hook.call(stock, session, *args, **kwargs)

    replacement.megatron_schedules_stock = stock  # type: ignore[attr-defined]
    return replacement
