"""Everything Megatron does, under every schedule: each feature alone, and pairs of them together.

Every case is trained by stock Megatron's own 1F1B too, with the same flags; see :mod:`.features`.
"""

from __future__ import annotations

from itertools import combinations, product

import pytest
import torch

from tests import tolerances
from tests.integration.conftest import Training
from tests.integration.features import ALL_FACTORS, FEATURES, SCHEDULES, Case, alone, together
from tests.integration.results import MODEL, Result
from tests.integration.test_same_result import CLIP_NOTHING

PIPELINE = ("--pipeline-model-parallel-size", "2")
RATE = float(MODEL[MODEL.index("--lr") + 1])


def trained(train: Training, case: Case, *job: str) -> tuple[Result, Result]:
    """Ours, and stock's, whose layers are spread evenly: where they are changes no result.

    ``job`` is how many iterations of how large a batch, where the case does not say.
    """
    flags = [*PIPELINE, *case.flags]
    if "--step-batch-size-schedule" not in flags:
        flags += job
    if "--clip-grad" not in flags:
        flags += CLIP_NOTHING
    model, loop = tuple(case.model), "own loop" if case.owns_loop else "plain"
    ours = train(case.world, *flags, *case.layout, *case.ours, tied=case.tied, model=model, samples=loop)
    return ours, train.stock(case.world, *flags, tied=case.tied, model=model)


def _draws_other_masks(case: Case) -> bool:
    """Masks are drawn from a state of each pipeline rank's own, where other layers may lie than in stock's run."""
    return "dropout" in case.features and (case.schedule != "zb-1p" or bool(case.layout))


def assert_agree(ours: Result, stock: Result, case: Case) -> None:
    """As equal as the arithmetic allows."""
    on = set(case.features)
    assert {"F", *case.passes} <= ours.passes
    assert not stock.passes
    assert len(ours.losses) == len(stock.losses) > 1
    assert "batch size ramp-up" not in on or len(stock.losses) == 4  # 4 + 4 + 8 + 8 samples; 3 of 8 without
    assert len(ours.evaluations) == len(stock.evaluations) == 2
    assert ours.loss_scales == stock.loss_scales
    if _draws_other_masks(case):
        assert ours.losses == pytest.approx(stock.losses, abs=0.1)
        assert ours.losses != stock.losses
        return
    for mine, theirs in ((ours.losses, stock.losses), (ours.evaluations, stock.evaluations)):
        if on & {"bf16", "fp16 with overflows"}:
            assert mine == pytest.approx(theirs, abs=tolerances.FEWER_BITS)
        else:
            assert mine == tolerances.losses(theirs)
    assert ours.gradients.keys() == stock.gradients.keys() == ours.weights.keys()
    sharded = any(name.startswith("distributed optimizer") for name in on)
    # Copies of tied weights add their gradients in another order; the norm that clips adds ranks' in another one.
    if on & {"tied embeddings", "gradient clipping", "multi-token prediction"}:
        if not sharded:
            tolerances.assert_gradients(ours.gradients, stock.gradients)
        tolerances.assert_weights(ours.weights, stock.weights, stock.gradients, RATE, len(stock.losses))
        return
    for found, expected in [(ours.weights, stock.weights)] + [(ours.gradients, stock.gradients)] * (not sharded):
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, atol=0, rtol=0, equal_nan=True, msg=str(key))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "case", [pytest.param(c, id=str(c), marks=pytest.mark.feature(c.features[-1], c.schedule)) for c in alone()]
)
def test_alone(train: Training, case: Case) -> None:
    assert_agree(*trained(train, case, "--global-batch-size", "8", "--train-iters", "3"), case)


def _shown(case: Case) -> set[str]:
    """What of a case its result shows."""
    if _draws_other_masks(case):
        return {"dropout"}
    # The auxiliary loss of experts overflows too, whatever is done with the loss.
    hidden = {"fp16 with overflows"} if "mixture of experts" in case.features else set()
    return {case.schedule, *case.features} - hidden


def _by_day() -> list[Case]:
    """Few cases of at most four ranks that show every schedule and every feature once (a greedy cover)."""
    shown = {case: _shown(case) for case in together() if case.world <= 4}
    left = set().union(*shown.values())
    chosen = []
    while left:
        chosen.append(max(shown, key=lambda case: (len(left & shown[case]), -case.world)))
        left -= shown[chosen[-1]]
    return chosen


_BY_DAY = _by_day()


@pytest.mark.job
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=str(case), marks=[pytest.mark.nightly] * (case not in _BY_DAY)) for case in together()],
)
def test_together(train: Training, case: Case) -> None:
    assert_agree(*trained(train, case, "--global-batch-size", "4", "--train-iters", "2"), case)


def test_every_pair_that_can_be_is_together_somewhere() -> None:
    cases = together()
    assert all(case.possible for case in cases)
    seen = {pair for case in cases for pair in combinations((case.schedule, *case.features), 2)}
    asked = [[name for name in values if name in FEATURES] for values in ALL_FACTORS.values()]
    for one, other in combinations([SCHEDULES, *asked], 2):
        for pair in product(one, other):
            needed = {need for name in pair if name in FEATURES for need in FEATURES[name].needs}
            schedules = {*pair, *needed}.intersection(SCHEDULES) or {""}
            features = {*pair, *needed}.difference(SCHEDULES)
            if len(schedules) == 1 and Case(*schedules, tuple(features)).possible:
                assert pair in seen, pair
