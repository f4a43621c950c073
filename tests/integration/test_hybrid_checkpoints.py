"""Hybrid models go on from any checkpoint: stock's of a GPT, or one of another schedule, size or cut of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from _pytest.mark import ParameterSet

from tests import tolerances
from tests.integration.conftest import Training
from tests.integration.features import MODERN, MOE_ALLTOALL
from tests.integration.results import Result
from tests.integration.test_checkpoints import RESHARDABLE, SAVED
from tests.integration.test_same_result import under

JOB = ("--train-iters", "4", "--global-batch-size", "4", "--clip-grad", "0", *MODERN.split())
SPEC = ("--spec", "megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec")
DENSE, AHEAD = "*-*-*-*-", "*-*-*-*-/*-"
EXPERTS = f"{MOE_ALLTOALL} --moe-grouped-gemm"
# Cuts inside of blocks.
HALF, HALF_OF_4 = "--pipeline-layers 1,3,2,2", "--pipeline-layers 3,1,3,1"
SIDES = {
    "1F1B": (2, ""),
    "PP1": (1, ""),
    "v-half, half blocks": (2, f"{' '.join(under('v-half'))} {HALF}"),
    "zb-1p PP4, half blocks": (4, f"{' '.join(under('zb-1p'))} {HALF_OF_4}"),
    "1f1b PP4": (4, "--pipeline-schedule 1f1b"),
    "v-zb, auto layers": (2, f"{' '.join(under('v-zb'))} --pipeline-layers auto"),
    "interleaved": (2, " ".join(under("interleaved-1f1b"))),
    "adaptive": (2, " ".join(under("adaptive"))),
    "shared v-half": (2, f"{' '.join(under('v-half'))} --pipeline-vocabulary-parallel"),
}


def flags(side: str, optimizer: str = RESHARDABLE) -> tuple[int, tuple[str, ...]]:
    """Ranks and flags of one of ``SIDES``."""
    ranks, schedule = SIDES[side]
    return ranks, (*JOB, *optimizer.split(), "--pipeline-model-parallel-size", str(ranks), *schedule.split())


def noted(feature: str, cases: Sequence[tuple[str, ...]]) -> list[ParameterSet]:
    """Cases with the feature that they show, under the schedule of their first side that has one; the first by day."""
    found = []
    for case in cases:
        words = " ".join(SIDES[side][1] for side in case if side in SIDES).split()
        schedule = words[words.index("--pipeline-schedule") + 1] if words else "1F1B"
        night = [pytest.mark.nightly] * bool(found)
        found.append(pytest.param(*case, marks=[pytest.mark.feature(feature, schedule, model="hybrid"), *night]))
    return found


def pattern(symbols: str) -> tuple[str, ...]:
    return (*SPEC, "--hybrid-layer-pattern", symbols)


def save(folder: Path) -> tuple[str, ...]:
    return ("--save", str(folder), "--save-interval", str(SAVED))


def assert_goes_on(resumed: Result, losses: list[float], shared: bool = False) -> None:
    assert len(resumed.losses) == 2
    if shared:  # words are summed in another order
        assert resumed.losses == pytest.approx(losses[SAVED:], abs=tolerances.FEWER_BITS)
    else:
        assert resumed.losses == losses[SAVED:]


@pytest.fixture(scope="module")
def gpt(te_train: Training, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Result]]:
    """Jobs of a GPT under stock's 1F1B that have saved, by the symbols of the same model."""
    return _Saved(te_train, tmp_path_factory)


class _Saved(dict[str, tuple[Path, Result]]):
    def __init__(self, te_train: Training, folders: pytest.TempPathFactory) -> None:
        self._train, self._folders = te_train, folders

    def __missing__(self, symbols: str) -> tuple[Path, Result]:
        folder = self._folders.mktemp("gpt")
        experts = EXPERTS.split() if "E" in symbols else []
        ranks, job = flags("1F1B")
        result = self._train.fresh(ranks, *job, *experts, "--num-layers", str(len(symbols) // 2), *save(folder))
        self[symbols] = folder, result
        return self[symbols]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("side", "symbols"),
    noted(
        "a GPT's checkpoint goes on in a hybrid model",
        [
            ("v-half, half blocks", DENSE),
            ("zb-1p PP4, half blocks", DENSE),
            ("1f1b PP4", DENSE),
            ("v-zb, auto layers", DENSE),
            ("interleaved", DENSE),
            ("adaptive", DENSE),
            ("PP1", DENSE),
            ("shared v-half", DENSE),
            ("v-half, half blocks", "*E*E*E*E"),
        ],
    ),
)
def test_a_gpts_checkpoint_goes_on_as_in_stocks_hybrid_run(
    te_train: Training, gpt: dict[str, tuple[Path, Result]], side: str, symbols: str
) -> None:
    """In a script like Megatron's ``pretrain_hybrid.py``, with the optimizer's state, and as the GPT itself goes on."""
    folder, straight = gpt[symbols]
    model = (*pattern(symbols), *(EXPERTS.split() if "E" in symbols else []))
    where = {"load": folder, "iteration": SAVED, "samples": "hybrid script"}
    ranks, job = flags(side)
    ours = te_train.resume(ranks, *job, *model, **where)
    assert_goes_on(ours, straight.losses, side.startswith("shared"))
    if side == "v-half, half blocks":
        ranks, job = flags("1F1B")
        stock = te_train.resume(ranks, *job, *model, **where)
        assert ours.losses == stock.losses and ours.evaluations == stock.evaluations
        assert ours.weights.keys() == stock.weights.keys() and len(stock.weights) > 8
        assert [str(key) for key, value in stock.weights.items() if not torch.equal(value, ours.weights[key])] == []


@pytest.mark.job
@pytest.mark.parametrize(
    ("start", "end", "symbols"),
    noted(
        "checkpoints crossing to and from stock, other sizes and schedules",
        [
            ("v-half, half blocks", "zb-1p PP4, half blocks", DENSE),
            ("zb-1p PP4, half blocks", "v-half, half blocks", DENSE),
            ("v-half, half blocks", "1f1b PP4", DENSE),
            ("v-half, half blocks", "1F1B", DENSE),
            ("PP1", "v-zb, auto layers", DENSE),
            ("v-zb, auto layers", "adaptive", DENSE),
            ("adaptive", "shared v-half", DENSE),
            ("shared v-half", "v-half, half blocks", DENSE),
            ("shared v-half", "1F1B", DENSE),
            ("1F1B", "v-zb, auto layers", AHEAD),
            ("v-zb, auto layers", "1f1b PP4", AHEAD),
        ],
    ),
)
def test_hybrid_checkpoints_cross_schedules_sizes_and_cuts_of_blocks(
    te_train: Training, tmp_path: Path, start: str, end: str, symbols: str
) -> None:
    ranks, job = flags(start)
    straight = te_train.fresh(ranks, *job, *pattern(symbols), *save(tmp_path))
    ranks, job = flags(end)
    resumed = te_train.resume(ranks, *job, *pattern(symbols), load=tmp_path, iteration=SAVED)
    assert_goes_on(resumed, straight.losses, "shared" in start + end)


@pytest.mark.nightly
def test_multi_token_prediction_in_a_script_like_megatrons_own_is_stocks(te_train: Training) -> None:
    _, job = flags("1F1B", "")
    model = (*MODERN.split(), *pattern(AHEAD))
    stock = te_train(2, *job, model=model, samples="hybrid script")
    for schedule in ("v-half", "zb-1p"):
        ours = te_train(2, *job, *under(schedule), model=model, samples="hybrid script")
        assert ours.losses == stock.losses and len(stock.losses) == 4
        assert [str(key) for key, value in stock.gradients.items() if not torch.equal(value, ours.gradients[key])] == []
