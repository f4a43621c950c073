"""Gradients that a function computes, and that wait for communication."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from megatron.schedules.runtime.deferred_gradient import DeferredClosure
from megatron.schedules.runtime.parameter_leaves import Key


class GatheringClosure(DeferredClosure):
    """Calls ``start`` where its communication starts, and ``closure`` where it is computed."""

    gathers = True

    def __init__(
        self,
        key: Key,
        closure: Callable[[], Any],
        start: Callable[[], None],
        held: Sequence[Tensor] = (),
        parameters: tuple[Tensor, ...] = (),
    ) -> None:
        super().__init__(key, closure, parameters, held)
        self._start = start

    def gather(self) -> None:
        self._start()
