"""The one error planning raises: its message is a single line meant for the person who asked."""

from __future__ import annotations


class PlanError(ValueError):
    """A request, a schedule or a file that cannot be planned; ``str(error)`` says what, and what would work."""
