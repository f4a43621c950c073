"""The GPU of a job is asked for before a plan that depends on it, and on a machine without one nobody waits for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.schedules.integration import machine
from megatron.schedules.integration.late_imports import TooEarlyError
from megatron.schedules.job.job_costs import uses_estimates
from tests.job.test_estimated_times import OFFLOADS, spec

pytestmark = pytest.mark.pure
PLAIN, OFFLOADING = spec(), replace(spec(), settings=OFFLOADS)


@pytest.fixture(autouse=True)
def before_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_early(name: str) -> Any:
        raise TooEarlyError(name)

    monkeypatch.setattr(machine, "after_megatron", too_early)


@pytest.mark.parametrize("there", [True, False], ids=["a GPU", "no GPU"])
def test_only_a_plan_that_depends_on_a_gpu_waits_for_its_name(
    there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_DEVICES", (tmp_path if there else tmp_path / "none",))
    assert uses_estimates(OFFLOADING) and not uses_estimates(PLAIN)
    assert machine._gpu(PLAIN) == ""
    if there:
        with pytest.raises(TooEarlyError):
            machine._gpu(OFFLOADING)
    else:
        assert machine._gpu(OFFLOADING) == ""
