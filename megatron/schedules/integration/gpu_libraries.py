"""Finds the optional libraries with GPU kernels and describes them in one log line at the start of a job."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import NamedTuple


class Library(NamedTuple):
    """Library that Megatron uses if it can be imported.

    Args:
        name: name in messages.
        modules: top-level modules that Megatron imports. The library is installed if all of them are.
        distribution: name in the package index.
    """

    name: str
    modules: tuple[str, ...]
    distribution: str


TRANSFORMER_ENGINE = Library("Transformer Engine", ("transformer_engine",), "transformer-engine")
# Apex can be installed without its kernels, and the package ``apex`` in the package index is another project.
LIBRARIES = (
    TRANSFORMER_ENGINE,
    Library("flash-attn", ("flash_attn",), "flash-attn"),
    Library("Apex", ("apex", "fused_weight_gradient_mlp_cuda"), "apex"),
)


def is_there(library: Library) -> bool:
    """Returns whether the library can be imported. It is not imported: that takes seconds and a GPU."""
    return all(sys.modules.get(name) or find_spec(name) is not None for name in library.modules)


def found(libraries: Sequence[Library] = LIBRARIES) -> str:
    """Returns a log line about the libraries."""
    here = [library for library in libraries if is_there(library)]
    lacking = ", ".join(library.name for library in libraries if library not in here)
    said = f"pipeline schedule: found {', '.join(map(_with_version, here)) or 'none of the GPU libraries'}"
    return f"{said}; not found: {lacking} (docs/install.md)" if lacking else said


def _with_version(library: Library) -> str:
    try:
        return f"{library.name} {version(library.distribution)}"
    except PackageNotFoundError:  # added to the path by hand
        return library.name
