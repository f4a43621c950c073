"""Collectives that tell when they are launched and when someone waits for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

_NAMES = {"all_gather_into_tensor": "gather", "reduce_scatter_tensor": "scatter", "all_reduce": "reduce"}


@contextmanager
def recorded(log: list[str]) -> Iterator[None]:
    """Write to ``log`` what Megatron and Transformer Engine ask of ``torch.distributed`` inside.

    A gather that nobody waits for apart from its launch is "blocking gather", others are "gather" and "wait gather".
    """
    from megatron.core.tensor_parallel import layers

    with ExitStack() as stack:
        for function, name in _NAMES.items():
            told = _told(log, name, getattr(torch.distributed, function))
            stack.enter_context(mock.patch.object(torch.distributed, function, told))
            if name != "reduce":
                stack.enter_context(
                    mock.patch.object(layers, f"dist_{'all' if name == 'gather' else 'reduce'}_{name}_func", told)
                )
        yield


def _told(log: list[str], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def told(*arguments: Any, **settings: Any) -> Any:
        log.append(name if settings.get("async_op") else f"blocking {name}")
        work = function(*arguments, **settings)
        return _Work(log, name, work) if settings.get("async_op") else work

    return told


class _Work:
    def __init__(self, log: list[str], name: str, work: Any) -> None:
        self._log, self._name, self._work = log, name, work

    def wait(self) -> None:
        self._log.append(f"wait {self._name}")
        self._work.wait()
