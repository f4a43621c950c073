"""Progress: how whoever plans for a while says how far it is."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[float], None]
"""Told what share of all the work has been done since it was told last."""


def unheard(share: float) -> None:
    """For whoever does not want to know."""
