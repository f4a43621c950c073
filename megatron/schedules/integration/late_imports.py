"""Modules that flag checks need and that may not be imported yet."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType


class TooEarlyError(Exception):
    """A check needs Megatron, which is not imported yet. The check is repeated after the import."""


def after_megatron(name: str) -> ModuleType:
    """Returns the module ``name``, which belongs to Megatron or imports torch.

    Raises:
        TooEarlyError: Megatron is not imported yet. Importing it takes seconds, and the CPU stand-in for CUDA must be
            enabled first.
    """
    if "megatron.core" not in sys.modules:
        raise TooEarlyError(name)
    return importlib.import_module(name)
