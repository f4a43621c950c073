"""The process groups of messages are made as stock's flags ask of its own."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from tests.integration.features import each_schedule
from tests.integration.results import MODEL, UNTIED
from tests.integration.server import Megatron
from tests.integration.test_same_result import under

JOB = "--train-iters 3 --global-batch-size 4 --pipeline-model-parallel-size 2 --eval-iters 0".split()
TIMEOUTS = "--distributed-timeout-minutes 7 --distributed-timeout-seconds-after-init 50".split()


@pytest.mark.parametrize("schedule", each_schedule("v-half"))
def test_timeouts_are_those_of_the_job(megatron: Megatron, schedule: str) -> None:
    """A minute of waiting is one thing while all start, another later."""
    found = megatron("message_timeouts", 2, [*MODEL, *UNTIED, *JOB, *under(schedule, "1"), *TIMEOUTS])
    assert found == [[[7 * 60.0] * 2, [50.0] * 2]] * 2


def options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, config: Any = None, **args: Any) -> Any:
    from megatron.schedules.integration.flags.arguments import group_flags
    from megatron.schedules.integration.messages import nccl_options

    monkeypatch.setitem(sys.modules, "yaml", SimpleNamespace(safe_load=json.load))
    if config is not None:
        (tmp_path / "nccl.yaml").write_text(json.dumps(config))
        args["nccl_communicator_config_path"] = tmp_path / "nccl.yaml"
    usual = {
        "nccl_communicator_config_path": None,
        "high_priority_stream_groups": [],
        "distributed_timeout_minutes": 10,
    }
    made = nccl_options(group_flags(Namespace(**usual | args)))
    return made.config.min_ctas, made.config.max_ctas, made.config.cga_cluster_size, made.is_high_priority_stream


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch was built without NCCL")
def test_what_nccl_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    default = dist.ProcessGroupNCCL.Options().config
    unset = default.min_ctas, default.max_ctas, default.cga_cluster_size
    assert options(monkeypatch, tmp_path) == (unset[0], 4, unset[2], True), "few multiprocessors, as it waits"
    assert options(monkeypatch, tmp_path, {"dp": {"max_ctas": 9}}) == (unset[0], 4, unset[2], True), "another group's"
    ours = {"pp": {"max_ctas": 9, "cga_cluster_size": 2}}
    assert options(monkeypatch, tmp_path, ours) == (unset[0], 9, 2, True)
    assert options(monkeypatch, tmp_path, {"pp": {"min_ctas": 8}}) == (8, unset[1], unset[2], True)


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch was built without NCCL")
def test_messages_have_high_priority_unless_the_file_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    low = {"pp": {"is_high_priority_stream": False}}
    assert options(monkeypatch, tmp_path, high_priority_stream_groups=["dp_cp"])[3]
    assert not options(monkeypatch, tmp_path, low, high_priority_stream_groups=["dp_cp"])[3]
    assert options(monkeypatch, tmp_path, low, high_priority_stream_groups=["pp"])[3]
