"""Spans of OpenTelemetry under the names that Megatron 0.20 gives to backwards and messages.

Stock marks its own backward and its own messages, which a schedule does not call. Its forward is called, and marks
itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from megatron.schedules.programs.program import Action, Op
from megatron.schedules.runtime.engine import Observer
from megatron.schedules.schedule.kinds import Kind

Opens = Callable[[str, str], AbstractContextManager[Any]]
"""Returns a span, given its group and its name."""

# Both parts of a split backward have the name of the whole, so that their times add up to its time.
_BACKWARD = ("microbatch", "megatron.microbatch.backward")
NAMES: Mapping[Kind | Op, tuple[str, str]] = {
    **dict.fromkeys((Kind.B, Kind.I, Kind.W), _BACKWARD),
    Op.SEND_F: ("communication", "megatron.p2p.send_forward"),
    Op.RECV_F: ("communication", "megatron.p2p.recv_forward"),
    Op.SEND_B: ("communication", "megatron.p2p.send_backward"),
    Op.RECV_B: ("communication", "megatron.p2p.recv_backward"),
}
"""Group and name of the span of each action that has one."""


class Spans(Observer):
    """Opens a span around each backward and each message."""

    def __init__(self, opens: Opens) -> None:
        self._opens = opens
        self._open: AbstractContextManager[Any] | None = None

    def began(self, action: Action) -> None:
        named = NAMES.get(action.op)
        if named is not None:
            self._open = self._opens(*named)
            self._open.__enter__()

    def ended(self, action: Action) -> None:
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None


def spans() -> Sequence[Spans]:
    """Returns an observer if this Megatron marks spans and the library that collects them is installed."""
    if find_spec("megatron.core.telemetry") is None:
        return ()
    try:
        opens: Opens = import_module("nemo.lens.helpers").managed_span
    except ImportError:
        return ()
    return (Spans(opens),)
