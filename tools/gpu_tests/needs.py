"""Checks what the GPU tests need; a separate process, so that its parent loads no driver."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec
from typing import Any

# What importing Megatron imports in turn, and the helpers that its data sets are indexed with.
_MODULES = ("numpy", "torch", "packaging", "setuptools", "triton")
_MEGATRON = ("megatron.core", "megatron.training", "megatron.core.datasets.helpers_cpp")
_OLDEST = (3, 12)


def missing() -> str:
    """Returns the first thing that this Python lacks, and what to do; empty where it has all."""
    if sys.version_info < _OLDEST:
        return f"{sys.executable} is Python {sys.version.split()[0]}; set PYTHON to a Python 3.12 or newer"
    for name in _MODULES:
        if find_spec(name) is None:
            return f"{sys.executable} has no {name}; set PYTHON to a Python that has"
    for name in _MEGATRON:
        if not _is_there(name):
            return (
                f"{sys.executable} has no {name}; set PYTHON to a Python with megatron-core 0.19, or PYTHONPATH to the "
                "folder into which its wheel was unpacked"
            )
    return ""


def _is_there(name: str) -> bool:
    """Whether the module can be found, without importing its packages."""
    if find_spec("megatron") is None:
        return False
    first, *rest = name.split(".")[1:]
    found = find_spec(f"megatron.{first}")
    if found is None or not rest:
        return found is not None
    folders = [os.path.join(place, *rest[:-1]) for place in found.submodule_search_locations or ()]
    listed = [file for folder in folders if os.path.isdir(folder) for file in os.listdir(folder)]
    return any(file.split(".")[0] == rest[-1] and _this_python(file) for file in listed)


def _this_python(file: str) -> bool:
    from importlib.machinery import EXTENSION_SUFFIXES

    return any(file.endswith(suffix) for suffix in EXTENSION_SUFFIXES)


def facts() -> dict[str, Any]:
    """Returns the machine and what is installed, by the names in the report, and ``gpus`` and ``device``."""
    import torch

    there = torch.cuda.is_available()
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if there else "none"
    return {
        "gpus": torch.cuda.device_count() if there else 0,
        "device": torch.cuda.get_device_name() if there else "",
        "shown": {
            "device": torch.cuda.get_device_name() if there else "CPU",
            "GPUs": str(torch.cuda.device_count() if there else 0),
            "driver": _driver(),
            "Python": sys.version.split()[0],
            "torch": torch.__version__,
            "CUDA": str(torch.version.cuda),
            "NCCL": nccl,
            "megatron-core": _version("megatron-core", "megatron.core"),
            "Transformer Engine": _version("transformer-engine", "transformer_engine"),
            "Apex": _version("apex", "apex"),
        },
    }


def _version(project: str, module: str) -> str:
    """Returns the version; a folder unpacked by hand may have none."""
    try:
        return metadata.version(project)
    except metadata.PackageNotFoundError:
        return "of unknown version" if find_spec(module) else "none"


def _driver() -> str:
    ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(ask, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "none"


if __name__ == "__main__":
    lacks = missing()
    print(json.dumps({"missing": lacks} if lacks else {"missing": "", **facts()}))
