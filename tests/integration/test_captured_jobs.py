"""Jobs whose whole iterations are CUDA graphs, on the model of CUDA graphs on the CPU, under Megatron's own wrapper.

Losses, and the gradients of all parameters, are those of the same job without graphs, to the bit, in training and in
evaluations. The first iteration has no graph, the second is captured and replayed, and the others are replayed: passes,
messages between ranks, reductions and the result's way to the last rank.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from _pytest.mark import ParameterSet

from tests.integration.results import Graphed
from tests.integration.server import ROUNDING_VARIABLE, Megatron
from tests.integration.test_graphed_jobs import (
    FP4,
    FP8,
    ITERATIONS,
    JOB,
    MODERN,
    OVERLAP,
    RECOMPUTED,
    SHARDED,
    WIDE,
    Job,
    unequal,
)
from tests.support.te_python import CAPABILITY_VARIABLE
from tests.tiers import by_night

GRAPH = "--cuda-graph-impl full_iteration --cuda-graph-warmup-steps 1".split()
PADDED = (
    f"{MODERN} --num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --moe-grouped-gemm "
    "--moe-expert-capacity-factor 1 --moe-pad-expert-input-to-capacity"
)
DAY = {"v-half": Job(graphs="")}
NIGHT = {
    **{schedule: Job(schedule, "") for schedule in ("1f1b", "1f1b-v", "interleaved-1f1b", "zb-1p", "v-zb", "v-min")},
    "adaptive": Job("adaptive --pipeline-memory-limit 0.6", ""),
    "auto": Job("auto", ""),
    "vocabulary parallel": Job("v-half --pipeline-vocabulary-parallel", ""),
    "odd microbatches": Job("v-half", "", f"{MODERN} --global-batch-size 3"),
    "four ranks": Job("v-zb", "", f"{MODERN} --pipeline-model-parallel-size 4 --global-batch-size 12", 2),
    "sequence parallel": Job("v-half", "", f"{MODERN} --tensor-model-parallel-size 2 --sequence-parallel", 2),
    "overlapped gradient reduction": Job("v-half", "", f"{MODERN} {OVERLAP}", 2),
    "distributed optimizer": Job("v-half", "", f"{MODERN} {SHARDED}", 2),
    "multi-token prediction": Job("v-half", "", f"{MODERN} --mtp-num-layers 1"),
    "hybrid model": Job("v-half", "", f"{MODERN} --hybrid-layer-pattern *-*-*-*-"),
    "low-rank adapters": Job("v-half", "", adapters=True),
    "tokens weighted alike": Job("v-half", "", f"{MODERN} --calculate-per-token-loss"),
    "experts of one size": Job("v-half", "", PADDED),
    "hidden messages of experts": Job(
        "v-half",
        "",
        f"{PADDED} --expert-model-parallel-size 2 --global-batch-size 8 --overlap-moe-expert-parallel-comm",
        2,
    ),
    "whole layers recomputed": Job(
        "v-half", "", f"{MODERN} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    ),
    "parts of layers recomputed": Job("v-half", "", f"{MODERN} {RECOMPUTED} core_attn mlp"),
    "FP8 tensorwise": Job("v-half", "", f"{WIDE} {FP8} tensorwise"),
    "FP8 delayed": Job("v-half", "", f"{WIDE} {FP8} delayed --fp8-amax-history-len 4"),
    "FP8 blockwise": Job("v-half", "", f"{WIDE} {FP8} blockwise"),
    "MXFP8": Job("v-half", "", f"{WIDE} {FP8} mxfp8", capability="10.0"),
    "MXFP8, primary weights": Job(
        "v-half",
        "",
        f"{WIDE} {FP8} mxfp8 --fp8-param-gather --reuse-grad-buf-for-mxfp8-param-ag {SHARDED}",
        2,
        capability="10.0",
    ),
    "NVFP4": Job("v-half", "", f"{WIDE} {FP4}", capability="10.0"),
}
JOBS = DAY | NIGHT


class Captured:
    """Runs jobs with and without a graph of whole iterations."""

    def __init__(self, server: Megatron, patch: pytest.MonkeyPatch) -> None:
        self._server, self._patch = server, patch

    def __call__(self, job: Job, *more: str, fault: str = "") -> list[Graphed]:
        self._patch.setenv(CAPABILITY_VARIABLE, job.capability)
        self._patch.setenv(ROUNDING_VARIABLE, "1")
        flags = f"--train-iters {ITERATIONS} --global-batch-size 4 {job.flags} --pipeline-schedule {job.schedule}"
        ranks: list[Graphed] = self._server(
            "graphed", 2 * job.ranks, [*JOB, *flags.split(), *more], fault, job.adapters
        )
        return ranks


@pytest.fixture(scope="module")
def captured(te: Megatron) -> Iterator[Captured]:
    with pytest.MonkeyPatch.context() as patch:
        yield Captured(te, patch)


def cases() -> Iterator[ParameterSet]:
    """All jobs, with the row of docs/compatibility.md that each belongs to."""
    for name, job in JOBS.items():
        model = "hybrid" if "--hybrid-layer-pattern" in job.flags else "GPT"
        feature = pytest.mark.feature("a CUDA graph of whole iterations", job.schedule.split()[0], model=model)
        yield pytest.param(name, marks=[feature] if name in DAY else [feature, pytest.mark.nightly])


@pytest.mark.job
@pytest.mark.parametrize("name", cases())
def test_an_iteration_is_captured_whole(captured: Captured, name: str) -> None:
    ours, plain = captured(JOBS[name], *GRAPH), captured(JOBS[name])
    assert unequal(ours, plain) == []
    assert len(ours[-1].evaluations) == 2 and ours[-1].evaluations == plain[-1].evaluations
    for rank in ours:
        assert rank.captures == 2 and rank.replays == [0, *[1] * (ITERATIONS - 1)]
        assert rank.waits == []


REFUSED_IN_A_CAPTURE = {
    "events asked": "Event.query in a capture",
    "sends not awaited": "messages of a capture do not join it",
}


@pytest.mark.job
@pytest.mark.parametrize("fault", ["events asked", by_night("sends not awaited")])
def test_what_a_capture_forbids_is_noticed(captured: Captured, fault: str) -> None:
    with pytest.raises(AssertionError, match=REFUSED_IN_A_CAPTURE[fault]):
        captured(DAY["v-half"], *GRAPH, fault=fault)


@pytest.mark.nightly
def test_a_question_between_hosts_is_noticed(captured: Captured) -> None:
    """In a call without a graph, hosts ask whether results have changed their form."""
    waits = {wait for rank in captured(DAY["v-half"], *GRAPH, fault="relay asks") for wait in rank.waits}
    assert waits and all("losses.py" in wait for wait in waits)


@pytest.mark.nightly
def test_samples_of_the_capture_are_noticed(captured: Captured) -> None:
    """A replay reads what lies in the inputs, and computes with it."""
    ours, plain = (captured(DAY["v-half"], *more, fault=fault) for more, fault in ((GRAPH, "first samples"), ((), "")))
    assert unequal(ours, plain)
