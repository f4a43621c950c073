"""Torch's function modes, such as a default device, which take ten times as long as a read of a tensor's attribute."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from operator import attrgetter

import torch
from torch import Tensor

without_modes: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunction
"""Surrounds code that only reads attributes of tensors, computes with them, or names the device of a new one."""

_version: Callable[[Tensor], int] = attrgetter("_version")
_are_on: Callable[[], bool] = torch._C._is_torch_function_mode_enabled


def versions_of(tensors: Iterable[Tensor]) -> list[int]:
    """Returns how often each of ``tensors`` was modified in place."""
    if not _are_on():  # as nearly always; without_modes takes as long as two reads
        return [*map(_version, tensors)]
    with without_modes():
        return [*map(_version, tensors)]
