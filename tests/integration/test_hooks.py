"""What we touch of Megatron: every name is there, nothing stacks up, and without the flag it is stock."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.mark.job
def test_every_replaced_name_exists_with_a_reason_and_is_replaced_once(megatron):
    for name, why, replaced, deep in megatron("hooks"):
        assert why, name
        assert replaced, f"{name} is not replaced"
        assert not deep, f"{name} is replaced twice over after a second install"


@pytest.mark.job
def test_without_the_flag_the_schedule_is_stocks_own(megatron):
    assert megatron("schedule_module") == "megatron.core.pipeline_parallel.schedules"


@pytest.mark.job
def test_a_job_begins_from_the_wheel_which_has_its_helpers_compiled_and_no_makefile(megatron):
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if any((Path(path) / "megatron/core/datasets/Makefile").exists() for path in given):
        pytest.skip("this Megatron is a checkout, which compiles its helpers")
    assert megatron("compiles_helpers") == [False, True]
