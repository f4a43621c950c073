"""Experts in fused operations, with a limit to their tokens and a paged stash, under Megatron's own runner.

HybridEP, grouped products and the stash's kernels have stand-ins in which the host knows no number of tokens. Fused
experts are never split: I computes their weight gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.integration.results import Graphed
from tests.integration.server import FUSED_EXPERTS_VARIABLE, Megatron
from tests.integration.test_captured_jobs import Captured
from tests.integration.test_graphed_jobs import FP4, FP8, FP8_EXPERTS, MODERN, MOE, Job, unequal
from tests.tiers import by_night

FUSED = "--use-transformer-engine-op-fuser"
UNLIMITED = (
    f"{MODERN} {FUSED} --num-experts 4 --moe-router-topk 2 --moe-grouped-gemm --moe-router-dtype fp32 "
    "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep --expert-model-parallel-size 2 "
    "--global-batch-size 8"
)
LIMITED = f"{UNLIMITED} --moe-expert-rank-capacity-factor 2"
# Pages for all rows, however the tokens of these few are spread.
STASHED = f"{LIMITED} --moe-paged-stash --moe-paged-stash-page-size 4 --moe-paged-stash-buffer-size-factor-cuda 2"
ITERATIONS = "--train-iters 5"
# The first iteration notes the order of passes, the second stashes, and the third is captured.
GRAPH = "--cuda-graph-impl full_iteration --cuda-graph-warmup-steps 2".split()
SCHEDULES = ("1f1b", "interleaved-1f1b", "zb-1p", "v-half", "v-zb", "v-min")


@pytest.fixture(scope="module")
def jobs(te: Megatron) -> Iterator[Callable[..., list[Graphed]]]:
    """Runs a job of experts under a schedule; the same one only once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FUSED_EXPERTS_VARIABLE, "1")
        captured, done = Captured(te, patch), dict[Any, list[Graphed]]()

        def run(
            schedule: str, flags: str, *more: str, ranks: int = 2, fault: str = "", capability: str = "9.0"
        ) -> list[Graphed]:
            key = schedule, flags, more, ranks, fault, capability
            if key not in done:
                job = Job(schedule, "", f"{flags} {ITERATIONS}", ranks, capability)
                done[key] = captured(job, *more, fault=fault)
            return done[key]

        yield run


WHOLE = {
    "bf16": (f"{MOE} {FUSED}", 1, "9.0"),
    "MXFP8": (f"{FP8_EXPERTS} {FUSED} {FP8} mxfp8", 1, "10.0"),
    "NVFP4": (f"{FP8_EXPERTS} {FUSED} {FP4}", 1, "10.0"),
    "HybridEP, with a limit": (LIMITED, 2, "9.0"),
}


@pytest.mark.job
@pytest.mark.parametrize("experts", ["bf16", *map(by_night, list(WHOLE)[1:])])
def test_fused_experts_have_the_gradients_of_whole_backwards(jobs: Any, experts: str) -> None:
    flags, ranks, capability = WHOLE[experts]
    split, whole = (jobs(schedule, flags, ranks=ranks, capability=capability) for schedule in ("zb-1p", "1f1b"))
    assert unequal(split, whole, 5) == []


@pytest.mark.nightly
@pytest.mark.feature("paged stash of fused experts")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_stash_is_captured_with_its_iteration(jobs: Any, schedule: str) -> None:
    """In any order of passes, and the stash brings back what it took."""
    plain, graphed = jobs(schedule, STASHED), jobs(schedule, STASHED, *GRAPH)
    assert unequal(plain, jobs(schedule, LIMITED), 5) == unequal(graphed, plain, 5) == []
    assert graphed[-1].evaluations == plain[-1].evaluations
    for rank in graphed:
        assert rank.replays == [0, 0, 1, 1, 1] and rank.waits == []


FEW_PAGES = STASHED + " --moe-paged-stash-buffer-size-factor-cuda 0.1"
FEW_ROWS = STASHED.replace("factor 2", "factor 0.1")


@pytest.mark.nightly
@pytest.mark.parametrize("schedule", ["v-half", "zb-1p"])
@pytest.mark.parametrize("more", [(), GRAPH], ids=["", "graph"])
@pytest.mark.parametrize("flags", [FEW_PAGES, FEW_ROWS], ids=["few pages", "few rows"])
def test_an_iteration_is_run_again_where_too_many_tokens_come(
    jobs: Any, schedule: str, flags: str, more: tuple[str, ...]
) -> None:
    """On the same microbatches, without a graph, a limit or a stash."""
    assert unequal(jobs(schedule, flags, *more), jobs(schedule, UNLIMITED), 5) == []


@pytest.mark.nightly
def test_a_stash_that_brings_back_other_rows_is_noticed(jobs: Any) -> None:
    assert unequal(jobs("v-half", STASHED, fault="wrong pages"), jobs("v-half", LIMITED), 5)


@pytest.mark.nightly
@pytest.mark.parametrize("flags", [FEW_PAGES, FEW_ROWS], ids=["few pages", "few rows"])
def test_a_call_that_is_not_run_again_is_noticed(jobs: Any, flags: str) -> None:
    """What is left is the first call's, without its dropped tokens."""
    assert unequal(jobs("v-half", flags, fault="runs once"), jobs("v-half", UNLIMITED), 5)
