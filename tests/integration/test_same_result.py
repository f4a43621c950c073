"""A schedule changes when work happens, never the result: losses and gradients against stock Megatron's own."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from megatron.schedules.planner.registry import Request, plan
from megatron.schedules.schedule.text_forms import to_csv
from tests import tolerances
from tests.integration.results import Result
from tests.tiers import by_night, some_by_night

SCHEDULES = ("zb-1p", "1f1b-v", "v-min", "v-half", "v-zb", "interleaved-1f1b")
ALL = (*SCHEDULES, "1f1b", "eager-1f1b", "zb-2p", "adaptive")
CLIP_NOTHING = ("--clip-grad", "0")


def under(schedule: str, limit: str = "0.75") -> tuple[str, ...]:
    """The flags that ask for ``schedule``, an adaptive one within ``limit`` of 1F1B's memory."""
    asked = ("--pipeline-schedule", schedule)
    if schedule == "adaptive":
        asked += ("--pipeline-memory-limit", limit)
    return asked


def differing(ours: Result, stock: Result) -> list[str]:
    """The parameters whose gradients are not the same to the bit."""
    assert ours.gradients.keys() == stock.gradients.keys()
    assert ours.gradients
    return [str(key) for key, value in stock.gradients.items() if not torch.equal(value, ours.gradients[key])]


def assert_same_losses(ours: Result, stock: Result, relative: float = tolerances.SAME_KERNELS) -> None:
    assert len(ours.losses) == len(stock.losses)
    assert ours.losses == tolerances.losses(stock.losses, relative)
    assert len(stock.evaluations) == 2  # validation and test
    assert ours.evaluations == tolerances.losses(stock.evaluations, relative)


# A number of microbatches that nothing divides, and fewer than ranks. Every schedule: test_compatibility.py.
USUAL = {("v-half", 4, 7)}


@pytest.mark.job
@pytest.mark.parametrize(
    ("schedule", "size", "microbatches"),
    some_by_night(product(SCHEDULES, (2, 4), (2, 4, 7)), lambda *case: case not in USUAL),
)
def test_ten_iterations_give_stock_losses_and_the_same_gradients_to_the_bit(train, schedule, size, microbatches):
    job = ("--train-iters", "10", "--global-batch-size", str(microbatches))
    pipeline = ("--pipeline-model-parallel-size", str(size))
    ours = train(size, *job, *pipeline, *under(schedule))
    assert len(ours.losses) == 10
    assert_same_losses(ours, train.stock(1, *job))
    assert differing(ours, train.stock(size, *job, *pipeline)) == []


PARALLEL = {
    "PP2 TP2 sequence parallel": (4, 2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "PP2 DP2": (4, 2, ""),
    "PP4 TP2 sequence parallel": (8, 4, "--tensor-model-parallel-size 2 --sequence-parallel"),
}

# Features together, under every schedule that has them: tests/integration/test_compatibility.py.
PARALLEL_USUAL = [("1f1b-v", "PP2 DP2")]


@pytest.mark.parametrize(
    ("schedule", "parallel"),
    some_by_night(product(ALL, PARALLEL), lambda *case: case not in PARALLEL_USUAL),
)
def test_tensor_sequence_and_data_parallelism(train, schedule, parallel):
    world, size, flags = PARALLEL[parallel]
    job = ("--train-iters", "2", "--global-batch-size", "8")
    one = train.stock(1, *job)
    job += ("--pipeline-model-parallel-size", str(size), *flags.split())
    ours, stock = train(world, *job, *under(schedule)), train.stock(world, *job)
    assert_same_losses(ours, stock)
    assert_same_losses(ours, one, tolerances.OTHER_KERNELS)
    assert differing(ours, stock) == []


@pytest.mark.parametrize(("size", "overlap"), [(2, False), (4, True)], ids=["PP2", "PP4 overlapped"])
@pytest.mark.parametrize("schedule", some_by_night(ALL, lambda name: name != "v-half"))
def test_distributed_optimizer(train, schedule, size, overlap):
    """Each rank holds a shard of the reduced gradients only, so what is compared is the weights they lead to."""
    job = ("--train-iters", "2", "--global-batch-size", "8", "--pipeline-model-parallel-size", str(size))
    job += ("--use-distributed-optimizer", *CLIP_NOTHING)
    if overlap:
        job += ("--overlap-grad-reduce", "--overlap-param-gather")
    ours, stock = train(2 * size, *job, *under(schedule)), train.stock(2 * size, *job)
    assert_same_losses(ours, stock)
    assert ours.weights.keys() == stock.weights.keys()
    assert [str(k) for k, v in stock.weights.items() if not torch.equal(v, ours.weights[k])] == []


@pytest.mark.parametrize(
    ("size", "limit"),
    [
        pytest.param(size, limit, marks=[pytest.mark.nightly] * ((size, limit) != (4, "0.375")))
        for size, limit in product((4, 8), ("0.375", "0.5", "1"))
    ],
)
def test_adaptive(train, size, limit):
    """Up to four chunks a rank; a number of microbatches that nothing divides."""
    job = ("--train-iters", "3", "--global-batch-size", str(2 * size - 1), "--num-layers", str(4 * size))
    pipeline = ("--pipeline-model-parallel-size", str(size))
    ours = train(size, *job, *pipeline, *under("adaptive", limit), "--pipeline-costs", "1,1.1,0.75,0.05")
    assert_same_losses(ours, train.stock(1, *job))
    assert differing(ours, train.stock(size, *job, *pipeline)) == []


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_an_odd_number_of_chunks_puts_the_output_layer_on_the_last_rank(train, tmp_path, tied):
    """A zigzag of three chunks, given as a CSV."""
    path = tmp_path / "zigzag.csv"
    request = Request("adaptive", 2, 5, memory_limit=1.0, chunk_choices=(3,), search_seconds=0.1)
    path.write_text(to_csv(plan(request)))
    job = ("--train-iters", "3", "--global-batch-size", "5", "--num-layers", "6")
    pipeline = ("--pipeline-model-parallel-size", "2")
    ours = train(2, *job, *pipeline, *under(str(path)), tied=tied)
    stock = train.stock(2, *job, *pipeline, tied=tied)
    assert_same_losses(ours, stock)
    if tied:
        tolerances.assert_gradients(ours.gradients, stock.gradients)
    else:
        assert differing(ours, stock) == []


@pytest.mark.parametrize("layers", [2, 6], ids=["ends without a layer", "ends with one layer less"])
@pytest.mark.parametrize("schedule", ["v-half", by_night("interleaved-1f1b"), by_night("adaptive")])
def test_ends_made_lighter(train, schedule, layers):
    """The embedding and the output layer stand in for a layer each, as in the paper's models."""
    job = ("--train-iters", "3", "--global-batch-size", "4", "--num-layers", str(layers))
    pipeline = ("--pipeline-model-parallel-size", "2")
    lighter = ("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split")
    ours = train(2, *job, *pipeline, *lighter, *under(schedule))
    assert_same_losses(ours, train.stock(1, *job))
    assert differing(ours, train.stock(2, *job, *pipeline, *lighter)) == []


TIED_USUAL = [("zb-1p", ""), ("v-half", "--use-distributed-optimizer")]


@pytest.mark.parametrize(
    ("schedule", "flags"),
    some_by_night(
        product(("zb-1p", "v-half", "interleaved-1f1b", "adaptive"), ("", "--use-distributed-optimizer")),
        lambda *case: case not in TIED_USUAL,
    ),
)
def test_tied_embeddings(train, schedule, flags):
    """Two copies of one weight: their gradients are added in another order than stock's, so equal to rounding only."""
    job = ("--train-iters", "3", "--global-batch-size", "8", "--pipeline-model-parallel-size", "2", *flags.split())
    ours = train(4, *job, *under(schedule), tied=True)
    assert_same_losses(ours, train.stock(4, *job, tied=True))
    first, last = ours.weights["embedding.word_embeddings.weight", 0, 0], ours.weights["output_layer.weight", 0, 0]
    assert torch.equal(first, last), "the two copies have drifted apart"
    if not flags:
        stock = train.stock(4, *job, tied=True)
        tolerances.assert_gradients(ours.gradients, stock.gradients)


@pytest.mark.parametrize("schedule", ["adaptive", by_night("zb-1p"), by_night("v-half")])
def test_loss_per_token(train, schedule):
    job = ("--train-iters", "3", "--global-batch-size", "8", "--pipeline-model-parallel-size", "2")
    job += ("--calculate-per-token-loss",)
    ours, stock = train(4, *job, *under(schedule)), train.stock(4, *job)
    assert_same_losses(ours, stock)
    assert differing(ours, stock) == []


@pytest.mark.parametrize("schedule", ["v-half", by_night("zb-1p"), by_night("interleaved-1f1b"), by_night("adaptive")])
def test_bf16(train, schedule):
    """The stages of a V differ from stock's, not the arithmetic: gradients are the same to the bit in bf16 too."""
    job = ("--train-iters", "3", "--global-batch-size", "4", "--pipeline-model-parallel-size", "2", "--bf16")
    # A norm that clips is summed in another order, and what it scales may round to another bf16 number.
    job += CLIP_NOTHING
    ours, stock = train(2, *job, *under(schedule)), train.stock(2, *job)
    assert ours.losses == tolerances.losses(stock.losses)
    assert differing(ours, stock) == []


def test_full_recompute_splits_the_recomputed_backward(train):
    job = ("--train-iters", "2", "--global-batch-size", "4", "--pipeline-model-parallel-size", "2")
    job += ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
    ours, stock = train(2, *job, *under("v-half")), train.stock(2, *job)
    assert_same_losses(ours, stock)
    assert differing(ours, stock) == []
