"""Any loop on megatron-core trains with our schedules, and its results and gradients stay the same to the bit."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.results import Call, Done
from tests.integration.server import ROOT
from tests.tiers import some_by_night
from tests.waiting import HANGS_S

PIPELINE, CHUNKS = "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"
CALLS = (
    Call(2, forward_only=True),
    Call(5, seed=1),
    Call(3, seed=2),
    Call(1, forward_only=True, seed=3),
    Call(5, seed=4),
)
ONE_CHUNK: dict[str, dict[str, Any]] = {
    "zb-1p": {"schedule": "zb-1p"},
    "adaptive": {"schedule": "adaptive", "memory_limit": 0.8},
    "zb-2p": {"schedule": "zb-2p"},
    "1f1b": {"schedule": "1f1b"},
    "eager-1f1b": {"schedule": "eager-1f1b"},
    "auto": {"schedule": "auto"},
}


def same(ours: Any, theirs: Any) -> bool:
    """Whether two nested results are equal, tensors to the bit."""
    if type(ours) is not type(theirs):
        return False
    if isinstance(ours, torch.Tensor) and ours.is_nested:
        return same(list(ours.unbind()), list(theirs.unbind()))
    if isinstance(ours, torch.Tensor):
        return ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(same(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, list | tuple):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return bool(ours == theirs)


def gradients(ranks: list[list[Done]], call: int) -> dict[str, torch.Tensor]:
    return {name: tensor for rank in ranks for name, tensor in rank[call].gradients.items()}


def check_same(ours: list[list[Done]], theirs: list[list[Done]]) -> None:
    """Compares results of the last rank and gradients of all ranks, call by call."""
    for at, call in enumerate(theirs[-1]):
        assert len(call.results) == CALLS[at].microbatches
        assert same(ours[-1][at].results, call.results)
        found, expected = gradients(ours, at), gradients(theirs, at)
        assert expected.keys() == found.keys() and (CALLS[at].forward_only or len(expected) > 8)
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        assert CALLS[at].forward_only or any(tensor.any() for tensor in expected.values())


def check_passes(ours: list[list[Done]], *, splits: bool) -> None:
    """Checks that our own passes ran, with split backwards in training where the schedule has them."""
    for call, *ranks in zip(CALLS, *ours, strict=True):
        assert all(rank.passes["F"] % call.microbatches == 0 for rank in ranks)
        assert any("W" in rank.passes for rank in ranks) == (splits and not call.forward_only)


@pytest.fixture(scope="module")
def stock(megatron: Any) -> Callable[..., list[list[Done]]]:
    """The same loop without this package, once for each size."""
    return cache(lambda ranks: megatron("core_loop", {PIPELINE: ranks}, None, CALLS))


def _some(schedules: Any, default: Sequence[str]) -> list[Any]:
    return some_by_night(schedules, lambda name: name not in default)


@pytest.mark.job
@pytest.mark.parametrize("schedule", _some(ONE_CHUNK, ("zb-1p",)))
def test_one_chunk_schedules_train_any_loop_alike(megatron: Any, stock: Any, schedule: str) -> None:
    ours = megatron("core_loop", {PIPELINE: 2}, ONE_CHUNK[schedule], CALLS)
    check_same(ours, stock(2))
    check_passes(ours, splits="1f1b" not in schedule)


def test_recompute_of_whole_layers_that_auto_leaves_out_changes_nothing(megatron: Any) -> None:
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    ours = megatron("core_loop", {PIPELINE: 2}, ONE_CHUNK["auto"], CALLS, **full)
    check_same(ours, megatron("core_loop", {PIPELINE: 2}, None, CALLS, **full))


SETTINGS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "four ranks": ({PIPELINE: 4}, {}),
    "lengths vary, as in verl": ({PIPELINE: 2}, {"varied": True}),
    "hidden states that are wider between stages": ({PIPELINE: 4}, {"varied": True, "wide": True}),
    "no data parallelism around the model": ({PIPELINE: 2}, {"wrapped": False}),
    "low-rank adapters alone": ({PIPELINE: 2}, {"adapters": True}),
    "biases that are frozen at first": ({PIPELINE: 2}, {"frozen_first": "linear_qkv.bias"}),
    "data and tensor parallelism": (
        {PIPELINE: 2, "tensor_model_parallel_size": 2, "data_parallel_size": 2},
        {},
    ),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_zb_1p_trains_alike_with(megatron: Any, setting: str) -> None:
    sizes, options = SETTINGS[setting]
    ours = megatron("core_loop", sizes, ONE_CHUNK["zb-1p"], CALLS, **options)
    check_same(ours, megatron("core_loop", sizes, None, CALLS, **options))
    check_passes(ours, splits=True)


@pytest.mark.job
def test_linears_of_transformer_engine_are_split_in_any_loop(te: Any) -> None:
    sizes = {PIPELINE: 2}
    ours = te("core_loop", sizes, ONE_CHUNK["zb-1p"], CALLS, engine=True)
    check_same(ours, te("core_loop", sizes, None, CALLS, engine=True))
    check_passes(ours, splits=True)


EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "expert_model_parallel_size": 2, "add_bias_linear": False}
STOCKS_OWN = ("overlap_moe_expert_parallel_comm", "delay_wgrad_compute")


def test_weight_gradients_hide_experts_messages_where_the_configuration_asks_stock_to(megatron: Any) -> None:
    """Stock itself would refuse it here: with one chunk a rank, and in fp32."""
    sizes = {PIPELINE: 2, "expert_model_parallel_size": 2}
    asked = dict.fromkeys(STOCKS_OWN, True)
    ours = megatron("core_loop", sizes, ONE_CHUNK["zb-1p"], CALLS, **EXPERTS, **asked)
    check_same(ours, megatron("core_loop", sizes, None, CALLS, **EXPERTS))
    check_passes(ours, splits=True)
    assert all(rank[at].passes["hidden"] for rank in ours for at, call in enumerate(CALLS) if not call.forward_only)


HYBRID = {"zb-1p": "*-*|-*-*-", "v-half": "*-|*|-*-|*-"}


@pytest.mark.parametrize("schedule", _some(HYBRID, ("v-half",)))
def test_a_hybrid_model_trains_alike_in_any_loop(te: Any, schedule: str) -> None:
    """Its stages are the segments of its pattern, in model order."""
    pattern, hybrid = HYBRID[schedule], {"engine": True, "is_hybrid_model": True}
    sizes = {PIPELINE: 2} if schedule == "zb-1p" else {PIPELINE: 2, CHUNKS: 2}
    ours = te("core_loop", sizes, {"schedule": schedule}, CALLS, pattern=pattern, **hybrid)
    check_same(ours, te("core_loop", {PIPELINE: 2}, None, CALLS, pattern=pattern.replace("|", ""), **hybrid))
    check_passes(ours, splits=True)


SEVERAL_CHUNKS: dict[str, dict[str, Any]] = {
    "v-half": {"schedule": "v-half"},
    "v-min": {"schedule": "v-min"},
    "v-zb": {"schedule": "v-zb"},
    "1f1b-v": {"schedule": "1f1b-v"},
    "interleaved-1f1b": {"schedule": "interleaved-1f1b"},
    "adaptive": {"schedule": "adaptive", "memory_limit": 0.6},
    "auto": {"schedule": "auto"},
}


@pytest.mark.job
@pytest.mark.parametrize("schedule", _some(SEVERAL_CHUNKS, ("v-half", "auto")))
def test_a_loop_with_two_chunks_trains_with_any_schedule_and_any_n(megatron: Any, stock: Any, schedule: str) -> None:
    ours = megatron("core_loop", {PIPELINE: 2, CHUNKS: 2}, SEVERAL_CHUNKS[schedule], CALLS)
    check_same(ours, stock(2))
    check_passes(ours, splits="1f1b" not in schedule)


def test_layers_that_do_not_divide_are_given_by_stage(megatron: Any) -> None:
    settings = {"schedule": "v-half", "layers": "2,2,2,1"}
    ours = megatron("core_loop", {PIPELINE: 2, CHUNKS: 2}, settings, CALLS, layers=7)
    whole = megatron("core_loop", {PIPELINE: 1}, None, CALLS, layers=7)
    check_same(ours, whole)
    check_passes(ours, splits=True)


def test_two_copies_of_a_tied_embedding_on_one_rank_start_and_stay_equal(megatron: Any) -> None:
    sizes, options = {PIPELINE: 2, "data_parallel_size": 2}, {"tied": True}
    ours = megatron("core_loop", sizes | {CHUNKS: 2}, SEVERAL_CHUNKS["v-half"], CALLS, **options)
    check_same(ours, megatron("core_loop", sizes, None, CALLS, **options))


PROGRAM = """
import megatron.schedules as ms
ms.without_gpu()
import megatron.core
from tests.integration.core_loop import core_loop
from tests.integration.test_core_loops import CALLS, CHUNKS, EXPERTS, PIPELINE, check_passes, check_same

theirs = core_loop({PIPELINE: 2}, None, CALLS)
for schedule, sizes in {"zb-1p": {PIPELINE: 2}, "v-half": {PIPELINE: 2, CHUNKS: 2}}.items():
    ours = core_loop(sizes, {"schedule": schedule}, CALLS)
    check_same(ours, theirs)
    check_passes(ours, splits=True)
sizes, asked = {PIPELINE: 2, "expert_model_parallel_size": 2}, {"overlap_moe_expert_parallel_comm": True}
ours = core_loop(sizes, {"schedule": "zb-1p"}, CALLS, **EXPERTS, **asked)
check_same(ours, core_loop(sizes, None, CALLS, **EXPERTS))
assert all(rank[1].passes["hidden"] for rank in ours)
print("megatron-core", megatron.core.__version__)
"""


@pytest.mark.nightly
@pytest.mark.parametrize("version", ["0.17", "0.18"])
def test_loops_on_earlier_versions_of_megatron_core_train_alike(tmp_path: Path, version: str) -> None:
    wanted = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", f"megatron-core=={version}.*"]
    subprocess.run(wanted, cwd=tmp_path, check=True, timeout=HANGS_S)
    for wheel in tmp_path.glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(tmp_path)
    folders = map(str, (ROOT, ROOT / "tests/integration", tmp_path))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(folders), "TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANGS_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert f"megatron-core {version}." in done.stdout
