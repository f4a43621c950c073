"""Checkpoints: a job goes on where it stopped, under the same schedule to the bit, under any other to rounding."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from megatron.schedules.planner.registry import Request, plan
from megatron.schedules.schedule.text_forms import to_csv
from tests import tolerances
from tests.integration.features import SCHEDULES, Case
from tests.integration.results import MODEL, UNTIED, Result
from tests.integration.test_same_result import under

SAVED, ITERATIONS = 2, 5
JOB = ("--train-iters", str(ITERATIONS), "--global-batch-size", "4")
DISTRIBUTED = "--use-distributed-optimizer"
# Saves what fits any parallel sizes; stock's default fits another data-parallel size only.
RESHARDABLE = f"{DISTRIBUTED} --dist-ckpt-optim-fully-reshardable"


class Saved(NamedTuple):
    """A job that saved after two iterations and went on: where, and what all its iterations gave."""

    folder: Path
    result: Result


@pytest.fixture(scope="module")
def saved(train, tmp_path_factory) -> Callable[..., Saved]:
    """Jobs that save; the same one runs once."""

    @cache
    def once(world: int, flags: tuple[str, ...], tied: bool, model: tuple[str, ...]) -> Saved:
        folder = tmp_path_factory.mktemp("saved")
        saving = ("--save", str(folder), "--save-interval", str(SAVED))
        return Saved(folder, train(world, *flags, *saving, tied=tied, model=model))

    # The cache tells a default left out from one that is given.
    def save(world: int, *flags: str, tied: bool = False, model: tuple[str, ...] = ()) -> Saved:
        return once(world, flags, tied, model)

    return save


def pipeline(size: int, *flags: str) -> tuple[str, ...]:
    return (*JOB, "--pipeline-model-parallel-size", str(size), *flags)


def case(*values: object, usual: bool) -> object:
    """Values of a test's parameters, left out where all but the usual are."""
    return pytest.param(*values, marks=() if usual else pytest.mark.nightly)


def assert_the_same(resumed: Result, straight: Result) -> None:
    """To the bit, from the loss of the first iteration after the checkpoint to the last weights."""
    assert len(straight.losses) == ITERATIONS
    assert resumed.losses == straight.losses[SAVED:]
    assert resumed.loss_scales == straight.loss_scales[SAVED:]
    assert resumed.weights.keys() == straight.weights.keys()
    assert [str(k) for k, v in straight.weights.items() if not torch.equal(v, resumed.weights[k])] == []


# How many ranks, whether embeddings are tied, flags, under which schedules, and under which of them by day.
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"
SHARED = "--pipeline-vocabulary-parallel"
ENOUGH = ("zb-1p", "v-half")  # where the schedule has no part in what is resumed
RESUMED = {
    "dropout": (2, False, DROPOUT, SCHEDULES, ()),
    "fp16": (2, False, "--fp16 --initial-loss-scale 65536 --loss-scale-window 1", ENOUGH, ()),
    "tied, DP2, shared reading": (4, True, "--ckpt-fully-parallel-load", ENOUGH, ("v-half",)),
    "tied, DP2, bf16, distributed optimizer": (4, True, f"--bf16 {DISTRIBUTED}", SCHEDULES, ()),
    "tied, DP2, distributed optimizer in fp32": (4, True, RESHARDABLE, ENOUGH, ()),
    "constant structure": (4, False, "--ckpt-assume-constant-structure", ENOUGH, ()),
    "shared vocabulary": (2, False, SHARED, ENOUGH, ()),
    "shared vocabulary, tied, DP2, shared reading": (4, True, f"{SHARED} --ckpt-fully-parallel-load", ENOUGH, ()),
    "shared vocabulary, tied, DP2, bf16": (4, True, f"{SHARED} --bf16 {DISTRIBUTED}", ENOUGH, ()),
}


@pytest.mark.feature("resume from a checkpoint, to the bit")
@pytest.mark.parametrize(
    ("schedule", "kind"),
    [
        pytest.param(schedule, kind, marks=pytest.mark.job if schedule in by_day else pytest.mark.nightly)
        for kind, (*_, schedules, by_day) in RESUMED.items()
        for schedule in schedules
    ],
)
def test_a_resumed_job_is_the_same_to_the_bit(train, saved, schedule, kind):
    world, tied, more, *_ = RESUMED[kind]
    flags = pipeline(2, *more.split(), *under(schedule))
    folder, straight = saved(world, *flags, tied=tied)
    assert_the_same(train.resume(world, *flags, load=folder, iteration=SAVED, tied=tied), straight)


@pytest.mark.nightly
@pytest.mark.feature("--exit-interval", "v-half")
def test_exit_at_an_interval_saves_and_the_next_start_goes_on(train, saved, tmp_path):
    flags = pipeline(2, *under("v-half"))
    first = train(2, *flags, "--save", str(tmp_path), "--save-interval", "100", "--exit-interval", str(SAVED))
    assert first.iterations == list(range(1, SAVED + 1))
    assert_the_same(train.resume(2, *flags, load=tmp_path, iteration=SAVED), saved(2, *flags).result)


def test_the_old_format_goes_where_the_placement_is_stocks_and_nowhere_else(train, megatron, tmp_path):
    old = pipeline(2, *under("zb-1p"), "--ckpt-format", "torch")
    save = ("--save", str(tmp_path), "--save-interval", str(SAVED))
    straight = megatron("train", 2, [*MODEL, *UNTIED, *old, *save])
    assert_the_same(train.resume(2, *old, load=tmp_path, iteration=SAVED), straight)
    with pytest.raises(AssertionError, match="does not say what layers it holds"):
        train.resume(2, *pipeline(2, *under("v-half")), load=tmp_path, iteration=SAVED)


@pytest.fixture(scope="module")
def four_chunks(tmp_path_factory) -> tuple[str, ...]:
    """The flags for a schedule that the adaptive search made for four chunks a rank."""
    path = tmp_path_factory.mktemp("plans") / "four.csv"
    path.write_text(to_csv(plan(Request("adaptive", 2, 4, memory_limit=1.0, chunk_choices=(4,), search_seconds=0.1))))
    return under(str(path))


TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
INTERLEAVED = ("--num-virtual-stages-per-pipeline-rank", "2")
SIDES = {
    "PP1": (1, JOB),
    "1F1B": (2, pipeline(2)),
    "1F1B DP2": (4, pipeline(2)),
    "1F1B TP2": (4, pipeline(2, *TP2)),
    "1F1B PP4": (4, pipeline(4)),
    "interleaved": (2, pipeline(2, *INTERLEAVED)),
    "zb-1p": (2, pipeline(2, *under("zb-1p"))),
    "our interleaved": (2, pipeline(2, *under("interleaved-1f1b"))),
    "v-half": (2, pipeline(2, *under("v-half"))),
    "v-half DP2": (4, pipeline(2, *under("v-half"))),
    "v-half TP2": (4, pipeline(2, *under("v-half"), *TP2)),
    "v-half PP4": (4, pipeline(4, *under("v-half"))),
    "adaptive": (2, pipeline(2, *under("adaptive"))),
    "v-min": (2, pipeline(2, *under("v-min"))),
    "v-zb": (2, pipeline(2, *under("v-zb"))),
    "shared 1F1B": (2, pipeline(2, *under("1f1b"), SHARED)),
    "shared v-half": (2, pipeline(2, *under("v-half"), SHARED)),
    "shared v-half DP2": (4, pipeline(2, *under("v-half"), SHARED)),
    "shared v-half TP2": (4, pipeline(2, *under("v-half"), SHARED, *TP2)),
    "shared zb-1p PP4": (4, pipeline(4, *under("zb-1p"), SHARED)),
}
# From, to, with the distributed optimizer, by default.
CROSSINGS = [
    ("v-half", "1F1B", False, False),
    ("v-half", "PP1", False, False),
    ("1F1B", "v-half", False, False),
    ("v-half DP2", "interleaved", True, True),
    ("1F1B", "v-half DP2", True, False),
    ("1F1B", "zb-1p", False, False),
    ("zb-1p", "our interleaved", False, False),
    ("our interleaved", "interleaved", False, False),
    ("interleaved", "v-half", False, False),
    ("PP1", "v-half", False, False),
    ("v-half", "v-half TP2", False, False),
    ("v-half", "v-half PP4", False, False),
    ("v-half DP2", "adaptive", False, False),
    ("1F1B TP2", "v-half", False, False),
    ("1F1B PP4", "adaptive", False, False),
    ("adaptive", "v-half DP2", False, False),
    ("v-half DP2", "1F1B TP2", True, False),
    ("v-half DP2", "v-half PP4", True, False),
    ("v-half DP2", "PP1", True, False),
    ("interleaved", "zb-1p", True, False),
    ("PP1", "adaptive", True, False),
    ("1F1B", "v-min", False, False),
    ("v-zb", "1F1B", False, False),
    ("shared v-half", "1F1B", False, False),
    ("PP1", "shared v-half", False, False),
    ("1F1B TP2", "shared zb-1p PP4", False, False),
    ("shared zb-1p PP4", "shared v-half TP2", False, False),
    ("shared v-half TP2", "1F1B", False, False),
    ("shared v-half DP2", "1F1B TP2", True, False),
    ("1F1B DP2", "shared v-half", True, False),
]


def crossing(start: str, end: str, distributed: bool, usual: bool) -> object:
    """The parameters of one crossing, noted for the schedule of ours that is part of it."""
    ours = next(name for name in (end, start) if "--pipeline-schedule" in SIDES[name][1])
    flags = SIDES[ours][1]
    schedule = flags[flags.index("--pipeline-schedule") + 1]
    marks = [pytest.mark.feature("checkpoints crossing to and from stock, other sizes and schedules", schedule)]
    return pytest.param(start, end, distributed, marks=marks + [pytest.mark.nightly] * (not usual))


def assert_goes_on(train, saved, start, end, optimizer=(), model=(), tied=False):
    """A job of one of ``SIDES`` goes on as another, with the losses of the one that was not interrupted."""
    (world, before), (world_after, after) = SIDES[start], SIDES[end]
    folder, straight = saved(world, *before, *optimizer, model=model, tied=tied)
    resumed = train.resume(world_after, *after, *optimizer, *model, load=folder, iteration=SAVED, tied=tied)
    # Another cut of matrices or words calls other kernels; optimizer state and weights are the same bits.
    other = any(how in f"{start} {end}" for how in ("TP2", "shared"))
    relative = tolerances.OTHER_KERNELS if other else tolerances.SAME_KERNELS
    assert resumed.losses == tolerances.losses(straight.losses[SAVED:], relative)
    assert len(resumed.losses) == ITERATIONS - SAVED


@pytest.mark.job
@pytest.mark.parametrize(("start", "end", "distributed"), [crossing(*how) for how in CROSSINGS])
def test_a_job_goes_on_under_another_schedule_or_other_sizes(train, saved, start, end, distributed):
    assert_goes_on(train, saved, start, end, RESHARDABLE.split() if distributed else ())


@pytest.mark.parametrize(
    ("start", "end", "what"),
    [
        case("v-half", "1F1B", "multi-token prediction", usual=True),
        case("v-half", "v-half", "multi-token prediction", usual=False),
        case("1F1B", "v-zb", "multi-token prediction", usual=False),
        case("v-half", "1F1B", "mixture of experts", usual=False),
        case("1F1B", "adaptive", "mixture of experts", usual=False),
    ],
)
def test_so_does_one_with_layers_of_other_kinds(train, saved, start, end, what):
    assert_goes_on(train, saved, start, end, model=tuple(Case("", (what,)).model))


@pytest.mark.parametrize(
    ("start", "end", "optimizer"),
    [
        case("shared v-half", "1F1B", RESHARDABLE, usual=False),
        case("1F1B", "shared 1F1B", RESHARDABLE, usual=False),
        case("shared 1F1B", "shared v-half", "", usual=False),
        case("v-half", "shared zb-1p PP4", "", usual=False),
    ],
)
def test_so_does_one_with_tied_embeddings_and_a_shared_vocabulary(train, saved, start, end, optimizer):
    assert_goes_on(train, saved, start, end, optimizer.split(), tied=True)


@pytest.mark.parametrize(
    ("chunks", "optimizer"),
    [
        case(2, "", usual=True),
        case(4, RESHARDABLE, usual=True),
        case(2, RESHARDABLE, usual=False),
        case("shared", RESHARDABLE, usual=False),
    ],
)
def test_a_process_without_this_package_goes_on_from_our_checkpoint(saved, megatron, four_chunks, chunks, optimizer):
    ours = {2: under("v-half"), 4: four_chunks, "shared": (*under("v-half"), SHARED)}[chunks]
    folder, straight = saved(2, *pipeline(2, *ours), *optimizer.split())
    flags = [*MODEL, *UNTIED, *pipeline(2), *optimizer.split()]
    iterations, losses = megatron("train_without_us", 2, [*flags, "--load", str(folder), "--ckpt-step", str(SAVED)])
    assert iterations == list(range(SAVED + 1, ITERATIONS + 1))
    relative = tolerances.OTHER_KERNELS if chunks == "shared" else tolerances.SAME_KERNELS
    assert losses == tolerances.losses(straight.losses[SAVED:], relative)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "side", [case("1F1B", usual=False), case("interleaved", usual=True), case("v-half", usual=False)]
)
def test_a_checkpoint_says_what_the_model_and_its_sizes_are(saved, megatron, side):
    """Its arguments in place of flags; the schedule is this job's own choice."""
    world, before = SIDES[side]
    folder, straight = saved(world, *before)
    said = {"--num-layers", "--hidden-size", "--num-attention-heads", "--max-position-embeddings"}
    flags = [f for at, f in enumerate(MODEL) if f not in said and (at == 0 or MODEL[at - 1] not in said)]
    flags += [*JOB, *under("v-zb"), "--use-checkpoint-args", "--use-mp-args-from-checkpoint-args"]
    resumed = megatron("train", world, [*flags, "--load", str(folder), "--ckpt-step", str(SAVED)])
    assert resumed.iterations == list(range(SAVED + 1, ITERATIONS + 1))
    assert resumed.losses == tolerances.losses(straight.losses[SAVED:])
