"""Iterations planned for their lengths: stock's gradients in the planned order, stock's losses, and no sample lost."""

from __future__ import annotations

import pytest
import torch

from tests import tolerances
from tests.integration.conftest import Training
from tests.integration.features import MODERN
from tests.integration.test_same_result import CLIP_NOTHING, differing, under
from tests.tiers import some_by_night

SAMPLES = {
    "packed": ("--dataloader-inter-document-masking",),
    # Stock's configuration refuses the default dispatcher beside variable lengths, of a dense model too.
    "cut": ("--micro-batch-size", "2", "--moe-token-dispatcher-type", "alltoall"),
}
JOB = (*CLIP_NOTHING, "--train-iters", "3", "--global-batch-size")
SETTINGS = {
    "PP2": (2, "8", "--pipeline-model-parallel-size 2"),
    "PP2 DP2 overlapped": (4, "12", "--pipeline-model-parallel-size 2 --overlap-grad-reduce"),
    "PP2 TP2 sequence parallel": (
        4,
        "6",
        "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel",
    ),
    "PP2 ramp-up": (2, "8", "--pipeline-model-parallel-size 2 --rampup-batch-size 4 4 8"),
    "PP4": (4, "8", "--pipeline-model-parallel-size 4"),
    "PP4 DP2 overlapped": (8, "16", "--pipeline-model-parallel-size 4 --overlap-grad-reduce"),
}
# Of two ranks, that with the output layer has more to do than the order of microbatches could make up for in a V.
CASES = [
    ("PP2", "1f1b", "packed"),
    ("PP2 DP2 overlapped", "zb-1p", "packed"),
    ("PP2 TP2 sequence parallel", "zb-1p", "packed"),
    ("PP4", "v-half", "packed"),
    ("PP4", "adaptive", "packed"),
    ("PP4", "interleaved-1f1b", "packed"),
    ("PP4 DP2 overlapped", "v-half", "packed"),
    ("PP2 ramp-up", "zb-1p", "packed"),
    ("PP2", "zb-1p", "cut"),
    ("PP4", "v-half", "cut"),
]
USUAL = [("PP2", "1f1b", "packed")]
PLANNED = "--pipeline-plan-lengths"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("setting", "schedule", "samples"),
    some_by_night(CASES, lambda *case: case not in USUAL),
)
def test_gradients_are_stocks_in_the_planned_order_and_losses_are_stocks(train, setting, schedule, samples):
    check_order(train, setting, schedule, samples)


def check_order(train: Training, setting: str, schedule: str, samples: str, model: tuple[str, ...] = ()) -> None:
    world, batch, flags = SETTINGS[setting]
    job = (*SAMPLES[samples], *JOB, batch, *flags.split())
    ours = train(world, *job, *under(schedule), PLANNED, samples=samples, model=model)
    assert all(len(of_rank) == 3 for of_rank in ours.orders)
    in_order = [tuple(sorted(order)) == order for of_rank in ours.orders for order in of_rank]
    assert not all(in_order)
    if "DP2" in setting:  # each replica has samples, and so plans, of its own
        assert len({tuple(of_rank) for of_rank in ours.orders}) == 2
    else:
        assert len({tuple(of_rank) for of_rank in ours.orders}) == 1
    ordered = train(world, *job, samples=samples, orders=ours.orders, model=model)
    assert differing(ours, ordered) == []
    assert ours.weights.keys() == ordered.weights.keys()
    assert [key for key, value in ordered.weights.items() if not torch.equal(value, ours.weights[key])] == []
    assert ours.losses == tolerances.losses(ordered.losses)
    stock = train.stock(world, *job, samples=samples, model=model)
    assert ours.losses[0] == stock.losses[0]
    # Weights differ from the first step on, by what another order of microbatches does to their gradients.
    assert ours.losses == tolerances.losses(stock.losses, tolerances.OTHER_KERNELS)
    assert ours.evaluations == tolerances.losses(stock.evaluations, tolerances.OTHER_KERNELS)


@pytest.mark.nightly
def test_so_are_those_of_a_hybrid_model(te_train):
    check_order(te_train, "PP2", "zb-1p", "packed", (*MODERN.split(), "--hybrid-layer-pattern", "*-*-*-*-"))


@pytest.mark.nightly
def test_no_sample_is_lost_at_a_checkpoint(train, tmp_path):
    world, batch, flags = SETTINGS["PP2"]
    job = ("--dataloader-inter-document-masking", "--train-iters", "4", "--global-batch-size", batch, *flags.split())
    job += (*under("zb-1p"), PLANNED, "--save", str(tmp_path), "--save-interval", "2")
    whole = train(world, *job, samples="packed")
    rest = train.resume(world, *job, load=tmp_path, iteration=2, samples="packed")
    assert [of_rank[2:] for of_rank in whole.orders] == rest.orders
    assert whole.losses[2:] == rest.losses


@pytest.mark.job
def test_what_is_read_ahead_is_handed_out_once_in_the_order_asked_for(megatron):
    found = megatron("reads_ahead")
    assert found["read"] == [[1, 2, 3, 4], [1, 2, 3]] and found["same"]
    assert found["upcoming"] == [4, 5]
    assert found["handed out"] == [3, 1, 2, 4, 5]
    assert found["not read before"] == [7, 6]
    assert found["at the end"] == [8, 9] == found["after it"]
    assert found["losses"] == ["a", "b", "c"]
    assert found["lengths"] == [[3, 4, 9], [12, 12], [5]]
    assert "neither cu_seqlens nor tokens" in found["other samples"]
    assert "reads ahead under Megatron's own iterators" in found["other iterators"]
