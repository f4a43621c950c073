"""Compiled C++ helpers of Megatron: compiled on this machine or shipped compiled."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path

from megatron.core.datasets import utils


def came_compiled() -> bool:
    """Returns whether the helpers are installed and cannot be compiled here.

    The wheel contains the compiled helpers but not the Makefile that stock runs.
    """
    makefile = Path(utils.__file__).with_name("Makefile")
    if makefile.exists() and shutil.which("make") is not None:
        return False
    return find_spec("megatron.core.datasets.helpers_cpp") is not None
