"""``tools/profile_passes.py`` of a hybrid model: each kind of layer is measured alone, and plans place half blocks."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.schedules.measure.cost_file import read_profile
from megatron.schedules.measure.job_profile import JobProfile
from megatron.schedules.schedule.kinds import Kind, Share
from tests.integration.conftest import Training
from tests.integration.features import MODERN, MOE_ALLTOALL
from tests.integration.server import Megatron
from tests.integration.test_same_result import under

SIZES = "--hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 96 --make-vocab-size-divisible-by 16"
# Transformer Engine's Python over plain torch accumulates into main gradients in bf16 alone.
JOB = f"{SIZES} --micro-batch-size 1 --profile-repetitions 2 --no-gradient-accumulation-fusion"
TOKENS, HIDDEN, FP32 = 16, 32, 4


def profile(te: Megatron, output: Path, pattern: str, flags: str = "") -> JobProfile:
    """What the tool writes of a model of these layers."""
    words = [*JOB.split(), *flags.split(), "--output", str(output), "--hybrid-layer-pattern", pattern]
    status, printed = te("profiled", words)
    assert status == 0, printed
    return read_profile(output)


@pytest.mark.nightly
def test_each_kind_of_layer_is_measured_alone(te: Megatron, tmp_path: Path) -> None:
    found = profile(te, tmp_path / "profile.json", "*-*--", "--swiglu --disable-bias-linear --normalization RMSNorm")
    # A stage for each run of equal layers between the embedding and the output layer.
    assert found.layers == (0, 1, 1, 1, 2, 0) and found.facts.layers == 5
    _, attention, mlp, again, two, _ = found.stages
    assert attention == again
    assert two.median(Kind.F) == pytest.approx(2 * mlp.median(Kind.F)) and two.held == pytest.approx(2 * mlp.held)
    # The inputs of its two linears, and the gradients of their outputs: a gated MLP of this size is twice as wide.
    assert mlp.sizes[Share.WEIGHTS] == FP32 * TOKENS * HIDDEN * (1 + 4 + 2 + 1)
    assert attention.sizes[Share.WEIGHTS] == FP32 * TOKENS * HIDDEN * (1 + 3 + 1 + 1)
    # Of a layer that is recomputed only its input is kept.
    for layer in (attention, mlp):
        assert layer.held - layer.sizes[Share.RECOMPUTED] == pytest.approx(FP32 * TOKENS * HIDDEN)
        assert {Kind.F, Kind.I, Kind.W, Kind.B, Kind.R} <= layer.times.keys()
    loads = found.model.layers
    assert [load.held for load in loads] == [attention.held, mlp.held, attention.held, mlp.held, mlp.held]


@pytest.mark.nightly
def test_experts_and_mambas_are_measured(te: Megatron, tmp_path: Path) -> None:
    mixers = "--mamba-num-heads 8 --mamba-head-dim 8 --mamba-state-dim 8 --mamba-num-groups 2"
    flags = f"{MODERN} {MOE_ALLTOALL} --moe-grouped-gemm {mixers} --spec tests.integration.plain_mixer STACK"
    found = profile(te, tmp_path / "profile.json", "ME*E", flags)
    assert found.layers == (0, 1, 1, 1, 1, 0)
    assert found.stages[2] == found.stages[4] and len({stage.held for stage in found.stages[1:4]}) == 3


@pytest.mark.nightly
def test_a_job_is_planned_for_what_was_measured(te: Megatron, te_train: Training, tmp_path: Path) -> None:
    profile(te, tmp_path / "profile.json", "*-*-*-*-", "--bf16")
    model = ("--hybrid-layer-pattern", "*-*-*-*-")
    costs = ("--pipeline-costs", str(tmp_path / "profile.json"), "--pipeline-layers", "auto")
    job = "--train-iters 2 --global-batch-size 4 --pipeline-model-parallel-size 2".split()
    ours = te_train(2, *job, *under("v-half"), *costs, model=model)
    assert ours.losses == te_train.stock(2, *job, model=model).losses
