"""Whether Megatron's helpers in C++ can be compiled here, or have come compiled."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path

from megatron.core.datasets import utils


def came_compiled() -> bool:
    """Whether they are there and cannot be made again: the wheel holds them without the Makefile that stock runs."""
    makefile = Path(utils.__file__).with_name("Makefile")
    if makefile.exists() and shutil.which("make") is not None:
        return False
    return find_spec("megatron.core.datasets.helpers_cpp") is not None
