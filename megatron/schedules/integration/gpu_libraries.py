"""Which of the libraries with kernels for GPUs, none of which is required, are here: one line at the start of a job."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import NamedTuple


class Library(NamedTuple):
    """One that Megatron uses where it can be imported.

    Args:
        name: as people call it.
        modules: what Megatron imports of it at the top level; it is there if all of them are.
        distribution: the name under which it is installed.
    """

    name: str
    modules: tuple[str, ...]
    distribution: str


TRANSFORMER_ENGINE = Library("Transformer Engine", ("transformer_engine",), "transformer-engine")
# Apex installs without its kernels too, and what the package index calls apex is another project's.
LIBRARIES = (
    TRANSFORMER_ENGINE,
    Library("flash-attn", ("flash_attn",), "flash-attn"),
    Library("Apex", ("apex", "fused_weight_gradient_mlp_cuda"), "apex"),
)


def is_there(library: Library) -> bool:
    """Whether it can be imported, as far as can be said without doing so, which takes seconds and a GPU."""
    return all(sys.modules.get(name) or find_spec(name) is not None for name in library.modules)


def found(libraries: Sequence[Library] = LIBRARIES) -> str:
    """One line on what is here, for a job's log."""
    here = [library for library in libraries if is_there(library)]
    lacking = ", ".join(library.name for library in libraries if library not in here)
    said = f"pipeline schedule: found {', '.join(map(_with_version, here)) or 'none of the GPU libraries'}"
    return f"{said}; not found: {lacking} (docs/install.md)" if lacking else said


def _with_version(library: Library) -> str:
    try:
        return f"{library.name} {version(library.distribution)}"
    except PackageNotFoundError:  # put on the path by hand
        return library.name
