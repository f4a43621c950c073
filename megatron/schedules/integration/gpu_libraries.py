"""Finds compiled libraries: the optional ones with GPU kernels, and Megatron's own helpers.

A job's first lines name the optional ones.
"""

from __future__ import annotations

import inspect
import shutil
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from megatron.schedules.integration.late_imports import TooEarlyError, after_megatron
from megatron.schedules.integration.touch_points import minor

ENGINE = "transformer_engine.pytorch"
LINEARS = ("Linear", "LayerNormLinear", "GroupedLinear")
"""Those of Transformer Engine whose backward can be split."""
OLDEST = "2.3"
"""The first version in which all of these can delay their weight gradients."""

OLDEST_WITH_GRAPHS = 2, 16
"""The first version, of those that were tried, that captures weight gradients in a CUDA graph of their own."""
GRAPHS_OF_STOCK = ("TECudaGraphHelper", "convert_schedule_table_to_order", "make_graphed_callables")
"""Names in ``megatron.core.transformer.cuda_graphs`` that are replaced. Not every version has them."""


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


def libraries_line(libraries: Sequence[Library] = LIBRARIES) -> str:
    """Returns a log line about the libraries."""
    here = [library for library in libraries if is_there(library)]
    lacking = ", ".join(library.name for library in libraries if library not in here)
    said = f"pipeline schedule: found {', '.join(map(_with_version, here)) or 'none of the GPU libraries'}"
    return f"{said}; not found: {lacking} (docs/getting-started.md)" if lacking else said


def _with_version(library: Library) -> str:
    """The library's name, with its version if what is imported is what pip installed, and not some other folder's."""
    try:
        installed = distribution(library.distribution)
    except PackageNotFoundError:  # added to the path by hand
        return library.name
    spec = find_spec(library.modules[0])
    imported = [Path(folder).resolve() for folder in (spec and spec.submodule_search_locations) or ()]
    own = Path(str(installed.locate_file(library.modules[0]))).resolve()
    return f"{library.name} {installed.version}" if own in imported else library.name


def leave_out_te() -> None:
    """Makes Megatron do without Transformer Engine, as on a machine without a GPU, unless it is imported already."""
    (name,) = TRANSFORMER_ENGINE.modules
    if name not in sys.modules and find_spec(name) is not None:
        sys.modules[name] = None  # type: ignore[assignment]


def te_missing() -> str | None:
    """Returns the reason why no layer of Transformer Engine's can be made here; None if nothing is known against it."""
    (name,) = TRANSFORMER_ENGINE.modules
    if sys.modules.get(name, name) is None:
        return "Transformer Engine needs a GPU"
    return None if is_there(TRANSFORMER_ENGINE) else "Transformer Engine is not installed"


def te_fault() -> str | None:
    """Returns the reason why Transformer Engine's linears cannot be split, without a full stop; None if they can.

    Raises:
        TooEarlyError: Transformer Engine is not imported yet.
    """
    if missing := te_missing():
        return missing
    try:
        engine = after_megatron(ENGINE)
    except TooEarlyError:
        raise
    except ModuleNotFoundError:
        return "Transformer Engine is not installed"
    except Exception as error:  # it loads shared libraries and queries devices, which can fail in many ways
        return f"Transformer Engine cannot be imported here, which ends in {type(error).__name__}"
    for name in LINEARS:
        linear = getattr(engine, name, None)
        if linear is None or "delay_wgrad_compute" not in inspect.signature(linear.__init__).parameters:
            return (
                f"Transformer Engine {te_version()} has no {name} that can delay weight gradients, "
                f"as {OLDEST} and later do"
            )
    return None


def graphs_fault() -> str | None:
    """Returns the reason why layers cannot be captured as CUDA graphs, without a full stop; None if they can.

    Raises:
        TooEarlyError: Transformer Engine is not imported yet.
    """
    if fault := te_fault():
        return fault
    if minor(te_version()) < OLDEST_WITH_GRAPHS:
        needed = ".".join(map(str, OLDEST_WITH_GRAPHS))
        return f"Transformer Engine {te_version()} has no CUDA graphs of weight gradients, as {needed} and later do"
    stock = after_megatron("megatron.core.transformer.cuda_graphs")
    lacking = [name for name in GRAPHS_OF_STOCK if not hasattr(stock, name)]
    return f"this megatron-core has no {', '.join(lacking)}" if lacking else None


def te_version() -> str:
    """Returns the imported version."""
    return str(getattr(sys.modules.get("transformer_engine"), "__version__", "of unknown version"))


def came_compiled() -> bool:
    """Returns whether Megatron's C++ helpers are installed and cannot be compiled here.

    The wheel contains the compiled helpers but not the Makefile that stock runs.
    """
    makefile = Path(str(after_megatron("megatron.core.datasets.utils").__file__)).with_name("Makefile")
    if makefile.exists() and shutil.which("make") is not None:
        return False
    return find_spec("megatron.core.datasets.helpers_cpp") is not None


def use_compiled_helpers(dataset_utils: Any) -> None:
    """Has ``megatron.core.datasets.utils`` compile nothing where its helpers came compiled: it would end the job."""
    if came_compiled():
        dataset_utils.compile_helpers = lambda: None
