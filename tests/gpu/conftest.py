"""What only GPUs show: the tests with the mark ``gpu``. With ``--try-on-cpu`` tiny models go through the same steps."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import pytest

from tests.gpu.settings import Setting, Shows


@cache
def _setting(on_cpu: bool) -> Setting:
    # The NVML check starts no CUDA driver, so that processes can fork.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    import torch

    setting = Setting(on_cpu, torch.cuda.device_count() if torch.cuda.is_available() else 0)
    if setting.on_cpu and setting.gpus:
        pytest.exit("--try-on-cpu is for machines without a GPU", returncode=2)
    return setting


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips what there are too few GPUs for, before any fixture imports Megatron."""
    mark = item.get_closest_marker("gpu")
    setting = _setting(item.config.getoption("--try-on-cpu"))
    least = (*mark.args, 1)[0] if mark else 0
    if not setting.on_cpu and setting.gpus < least:
        pytest.skip(f"takes {least} GPU{'s' if least > 1 else ''} or more; found {setting.gpus}")


@pytest.fixture(scope="session")
def setting(request: pytest.FixtureRequest) -> Setting:
    """Where the tests run."""
    return _setting(request.config.getoption("--try-on-cpu"))


@pytest.fixture(scope="session")
def jobs(setting: Setting) -> Any:
    """The module :mod:`tests.gpu.jobs`; it imports Megatron, on its CPU stand-in where there is no GPU."""
    return importlib.import_module("tests.gpu.jobs")


@pytest.fixture
def shows(record_property: Callable[[str, object], None]) -> Shows:
    """Prints figures, keeps them for ``--junitxml``, and fails where there is a fault."""

    def shows(figures: Mapping[str, Any], fault: str = "") -> None:
        for name, value in figures.items():
            shown = f"{value:.4g}" if isinstance(value, float) else str(value)
            print(f"{name}: {shown}")
            record_property(name, shown)
        assert not fault, fault

    return shows
