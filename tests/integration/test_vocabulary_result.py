"""A vocabulary cut over all pipeline ranks: the losses and gradients of stock's own run, whatever else is on."""

from __future__ import annotations

import shlex
from itertools import product

import pytest
import torch
from _pytest.mark import ParameterSet

from tests import tolerances
from tests.integration.features import MODERN, MOE_ALLTOALL, SCHEDULES
from tests.integration.results import MODEL, UNTIED, Result
from tests.integration.test_same_result import CLIP_NOTHING, assert_same_losses, differing, under
from tests.tiers import by_night

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
SHARED = "--pipeline-vocabulary-parallel"


def shared(schedule: str) -> tuple[str, ...]:
    return (*under(schedule), SHARED)


def assert_same(ours: Result, stock: Result) -> None:
    assert_same_losses(ours, stock, tolerances.OTHER_KERNELS)
    tolerances.assert_gradients(ours.gradients, stock.gradients, tolerances.other_gradients)


TENSOR = "--tensor-model-parallel-size 2"
# Ranks, pipeline ranks, flags of the job, flags of the model, whether embeddings are tied.
SETTINGS = {
    "two ranks": (2, 2, "", "", False),
    "four ranks": (4, 4, "", "", False),
    "tied": (2, 2, "", "", True),
    "tied, four ranks, data parallel": (8, 4, "", "", True),
    "tensor parallel": (4, 2, TENSOR, "", False),
    "sequence parallel": (4, 2, f"{TENSOR} --sequence-parallel", "", False),
    "sequence parallel, rope": (4, 2, f"{TENSOR} --sequence-parallel", MODERN, False),
    "sequence parallel, tied, rope": (4, 2, f"{TENSOR} --sequence-parallel", MODERN, True),
    "experts": (4, 2, f"{TENSOR} --sequence-parallel", f"{MODERN} {MOE_ALLTOALL}", False),
    "loss per token": (4, 2, "--calculate-per-token-loss", "", False),
    "clipping": (2, 2, "--clip-grad 0.1", "", False),
    "clipping, tied": (2, 2, "--clip-grad 0.1", "", True),
    "overlapped reduction": (4, 2, "--overlap-grad-reduce", "", False),
    "overlapped reduction, tied": (4, 2, "--overlap-grad-reduce", "", True),
    "microbatches of two": (2, 2, "--micro-batch-size 2", "", False),
    "full recompute": (
        2,
        2,
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "",
        False,
    ),
}
USUAL = {("tied", "v-half")}
EVERYWHERE = ("two ranks", "tied", "sequence parallel", "overlapped reduction")
FEATURE = "vocabulary shared by all ranks"


def cases() -> list[ParameterSet]:
    """Every setting under few schedules, and few settings under every one."""
    pairs = [(setting, schedule) for setting in SETTINGS for schedule in ("1f1b", "zb-1p", "v-half")]
    pairs += [pair for pair in product(EVERYWHERE, SCHEDULES) if pair not in pairs]
    marks = {pair: [] if pair in USUAL else [pytest.mark.nightly] for pair in pairs}
    return [pytest.param(*pair, marks=[pytest.mark.feature(FEATURE), *marks[pair]]) for pair in pairs]


@pytest.mark.job
@pytest.mark.parametrize(("setting", "schedule"), cases())
def test_losses_and_gradients_are_stocks(train, setting, schedule):
    world, size, flags, model, tied = SETTINGS[setting]
    job = ("--train-iters", "3", "--global-batch-size", "8", "--pipeline-model-parallel-size", str(size))
    job += tuple(shlex.split(flags))
    how = {"model": tuple(shlex.split(model)), "tied": tied}
    assert_same(train(world, *job, *shared(schedule), **how), train.stock(world, *job, **how))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.nightly
def test_schedules_are_equal_to_the_bit(train, schedule):
    job = ("--train-iters", "3", "--global-batch-size", "6", "--pipeline-model-parallel-size", "2")
    one, other = train(2, *job, *shared("1f1b")), train(2, *job, *shared(schedule))
    assert differing(other, one) == []
    assert other.losses == one.losses


@pytest.mark.parametrize(
    ("schedule", "flags"),
    [
        pytest.param("v-half", "--overlap-grad-reduce --overlap-param-gather"),
        by_night("zb-1p", "--overlap-grad-reduce --overlap-param-gather"),
        by_night("1f1b", ""),
        by_night("interleaved-1f1b", "--overlap-grad-reduce"),
    ],
)
@pytest.mark.parametrize("tied", [by_night(False), True], ids=["untied", "tied"])
def test_distributed_optimizer(train, schedule, flags, tied):
    """Each rank holds a shard of the reduced gradients only; the weights are those of the plain one."""
    job = ("--train-iters", "3", "--global-batch-size", "8", "--pipeline-model-parallel-size", "2", *CLIP_NOTHING)
    plain = train(4, *job, *shared(schedule), tied=tied)
    job += ("--use-distributed-optimizer", *flags.split())
    ours = train(4, *job, *shared(schedule), tied=tied)
    assert_same_losses(ours, train.stock(4, *job, tied=tied), tolerances.OTHER_KERNELS)
    assert ours.weights.keys() == plain.weights.keys()
    assert [str(key) for key, value in plain.weights.items() if not torch.equal(value, ours.weights[key])] == []
    assert not tied or torch.equal(ours.weights[EMBEDDING, 0, 0], ours.weights[OUTPUT, 0, 0])


@pytest.mark.parametrize(
    ("schedule", "flags"),
    [
        pytest.param("v-half", "--context-parallel-size 2"),
        by_night("1f1b", "--context-parallel-size 2 --calculate-per-token-loss"),
    ],
)
@pytest.mark.nightly
def test_context_parallelism(train, schedule, flags):
    job = ("--train-iters", "2", "--global-batch-size", "8", "--pipeline-model-parallel-size", "2", *flags.split())
    ours, stock = (train(4, *job, *more, attention="plain") for more in (shared(schedule), ()))
    assert_same(ours, stock)


NUMBERS = {"bf16": "--bf16", "fp16": "--fp16 --initial-loss-scale 65536"}


@pytest.mark.parametrize(
    ("numbers", "flags"),
    [
        pytest.param("bf16", ""),
        by_night("bf16", f"{TENSOR} --sequence-parallel"),
        by_night("fp16", ""),
    ],
)
@pytest.mark.parametrize("schedule", ["v-half", by_night("1f1b")])
def test_fewer_bits_are_as_near_to_fp32_as_stocks(train, numbers, flags, schedule):
    job = ("--train-iters", "3", "--global-batch-size", "4", "--pipeline-model-parallel-size", "2", *flags.split())
    world = 4 if flags else 2
    exact = train.stock(world, *job)
    job += tuple(NUMBERS[numbers].split())
    ours, stock = train(world, *job, *shared(schedule)), train.stock(world, *job)
    assert ours.losses == pytest.approx(stock.losses, abs=2 * tolerances.FEWER_BITS)
    assert ours.loss_scales == stock.loss_scales
    scale = stock.loss_scales[0]
    for key in (EMBEDDING, 0, 0), (OUTPUT, 0, 0), ("decoder.layers.7.mlp.linear_fc2.weight", 0, 0):
        right = exact.gradients[key]
        mine, theirs = (float((each.gradients[key].float() / scale - right).norm()) for each in (ours, stock))
        assert mine < 1.2 * theirs, key


def test_overflows_are_skipped_as_stock_skips_them(train):
    job = ("--train-iters", "4", "--global-batch-size", "4", "--pipeline-model-parallel-size", "2")
    job += ("--fp16", "--initial-loss-scale", "4294967296", "--hysteresis", "1")
    ours, stock = train(2, *job, *shared("v-half")), train.stock(2, *job)
    assert ours.loss_scales == stock.loss_scales
    assert len(set(ours.loss_scales)) > 1


@pytest.mark.parametrize("schedule", ["v-half", by_night("zb-1p")])
def test_frozen_tables_take_no_gradient(train, schedule):
    """Low-rank adapters are trained, beside linears that are frozen as the vocabulary is."""
    job = ("--train-iters", "3", "--global-batch-size", "4", "--pipeline-model-parallel-size", "2")
    job += ("--dist-ckpt-strictness", "ignore_all", "--lr", "1e-2")  # the start has no adapters
    ours, stock = (train(2, *job, *more, adapters=True) for more in (shared(schedule), ()))
    assert_same(ours, stock)
    assert not any(name in (EMBEDDING, OUTPUT) for name, _, _ in ours.gradients)


@pytest.mark.parametrize(
    ("world", "flags", "tied"),
    [
        (2, "--pipeline-schedule 1f1b", False),
        by_night(4, f"--pipeline-schedule 1f1b {TENSOR}", False),
        by_night(2, "--pipeline-schedule 1f1b", True),
    ],
)
def test_from_scratch_it_starts_where_stock_starts(megatron, world, flags, tied):
    """To the bit: nothing is learnt in the one iteration."""
    job = [*MODEL, *([] if tied else UNTIED), *"--train-iters 1 --global-batch-size 4 --lr 0 --min-lr 0".split()]
    job += ["--pipeline-model-parallel-size", "2"]
    ours = megatron("train", world, [*job, SHARED, *shlex.split(flags)])
    stock = megatron("train", world, [*job, *shlex.split(flags.replace("--pipeline-schedule 1f1b", ""))])
    assert ours.weights.keys() == stock.weights.keys()
    assert [str(key) for key, value in stock.weights.items() if not torch.equal(value, ours.weights[key])] == []


@pytest.mark.nightly
def test_a_vocabulary_is_padded_so_that_all_ranks_have_as_many_words(train):
    """96 words on three ranks of two tensor-parallel ones would be 16 each; 80 are padded to 96, not to 80."""
    job = ("--train-iters", "2", "--global-batch-size", "3", "--pipeline-model-parallel-size", "3")
    job += ("--vocab-size", "80", "--num-layers", "6")
    losses = train(3, *job, *shared("1f1b")).losses
    stock = train.stock(1, *job[:4], *job[6:], "--padded-vocab-size", "96").losses
    assert losses == tolerances.losses(stock, tolerances.OTHER_KERNELS)


@pytest.mark.parametrize("schedule", ["1f1b", by_night("v-half")])
def test_what_a_rank_holds_of_the_output_layer_is_counted(megatron, schedule, tmp_path):
    """Half of the probabilities on each of two ranks, which count as activations from S to T."""
    job = [*MODEL, *UNTIED, *"--vocab-size 8192 --train-iters 2 --global-batch-size 4".split()]
    job += ["--pipeline-model-parallel-size", "2", *under(schedule), "--pipeline-measure", str(tmp_path)]
    tokens, words, bytes_each = 16, 8192, 4
    assert min(megatron("train", 2, [*job, SHARED]).peaks) > tokens * words // 2 * bytes_each


@pytest.mark.nightly
def test_layers_are_placed_by_the_planner_too(train):
    """Six on the eight stages of a V: the last stage has none, and nothing to do but to end."""
    job = ("--train-iters", "2", "--global-batch-size", "4", "--num-layers", "6")
    pipeline = ("--pipeline-model-parallel-size", "4", "--pipeline-layers", "auto")
    assert_same(train(4, *job, *pipeline, *shared("v-half")), train.stock(1, *job))
