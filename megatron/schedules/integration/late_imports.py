"""Modules that checks of flags need, where the checks may also run before Megatron is imported."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType


class TooEarlyError(Exception):
    """A check needs Megatron, which is not imported yet; it is repeated when it is."""


def after_megatron(name: str) -> ModuleType:
    """The module ``name``, Megatron's or one that imports torch.

    Raises:
        TooEarlyError: where Megatron is not imported: that takes seconds, and a CPU stand-in for CUDA comes before it.
    """
    if "megatron.training" not in sys.modules:
        raise TooEarlyError(name)
    return importlib.import_module(name)
