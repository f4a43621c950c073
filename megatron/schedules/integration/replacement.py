"""Replacement of names of stock Megatron."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from types import ModuleType
from typing import Any, NamedTuple

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
    """Puts ``hooks`` in place in this process. A second call replaces the session and does not stack hooks."""
    for hook in hooks:
        stock = getattr(hook.module, hook.name)
        stock = getattr(stock, "megatron_schedules_stock", stock)
        setattr(hook.module, hook.name, _replacement(hook, stock, session))


def _replacement(hook: Hook, stock: Stock, session: Session) -> Stock:
    """Returns a function (or method) that replaces ``stock``."""

    @functools.wraps(stock)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return hook.call(stock, session, *args, **kwargs)

    replacement.megatron_schedules_stock = stock  # type: ignore[attr-defined]
    return replacement
