"""Hybrid models: losses and gradients are those of stock Megatron, with its own stages or with others, to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.schedules.integration.flags.arguments import completed, spec_of
from megatron.schedules.integration.flags.declared import stock_parser
from megatron.schedules.job.machine import Machine
from megatron.schedules.job.plan_job import plan_job
from megatron.schedules.utils.errors import PlanError
from tests import tolerances
from tests.integration.conftest import Training
from tests.integration.features import CHUNKS, MODERN, MOE_ALLTOALL, each_schedule
from tests.integration.results import MODEL as SMALL
from tests.integration.results import UNTIED
from tests.integration.server import Megatron
from tests.integration.test_dry_run_memory import MIXERS
from tests.integration.test_same_result import under
from tests.integration.test_te_jobs import assert_stocks
from tests.tiers import by_night

MODEL = f"{MODERN} {MOE_ALLTOALL} --moe-grouped-gemm --spec tests.integration.plain_mixer STACK"
JOB = "--train-iters 3 --global-batch-size 4 --pipeline-model-parallel-size 2 --clip-grad 0".split()
# Every kind of layer, in stages of unequal length, by chunks of a rank. Where a rank has no experts, stock cannot log
# their auxiliary loss (below); where a stage has no layers, stock frees its output before it is read.
PATTERNS = {1: "E*E-|ME-*M*-E", 2: "E*|E-M|E-*M|*-E", 4: "E|*E|-|M|E-|*|M*|-E"}
LETTERS = "E*E-ME-*M*-E"


def hybrid(pattern: str) -> tuple[str, ...]:
    return (*MODEL.split(), "--hybrid-layer-pattern", pattern)


@pytest.mark.job
@pytest.mark.feature("layers of every kind, stages as the pattern says", model="hybrid")
@pytest.mark.parametrize("schedule", each_schedule("v-half"))
def test_the_patterns_segments_are_the_stages_in_model_order(te_train: Training, schedule: str) -> None:
    """Stock runs its 1F1B, or interleaves the same segments round the ranks."""
    model = hybrid(PATTERNS[CHUNKS.get(schedule, 2)])
    ours = te_train(2, *JOB, *under(schedule, "1"), model=model)
    assert_stocks(ours, te_train.stock(2, *JOB, model=model), shards=False)


@pytest.mark.parametrize(
    ("schedule", "layers"),
    [
        ("v-half", ""),
        by_night("v-half", "2,0,5,5"),
        by_night("zb-1p", "4,8"),
        ("v-zb", "auto"),
        by_night("zb-1p", "auto"),
        by_night("adaptive --pipeline-memory-limit 0.01GiB", "auto"),
        by_night("auto", ""),
    ],
)
def test_a_pattern_without_segments_is_divided_as_other_layers_are(
    te_train: Training, schedule: str, layers: str
) -> None:
    """Stock interleaves none, so here it runs 1F1B."""
    model = hybrid(LETTERS)
    placed = ["--pipeline-layers", layers] if layers else []
    ours = te_train(2, *JOB, *" ".join(under(schedule)).split(), *placed, model=model)
    assert_stocks(ours, te_train.stock(2, *JOB, model=model), shards=False)


@pytest.mark.parametrize("schedule", ["v-half", by_night("zb-1p"), by_night("adaptive")])
def test_megatrons_own_mixers_get_stocks_gradients(te_train: Training, schedule: str) -> None:
    """Their parameters beside linears too, whose gradients are no matter of W."""
    model = (*f"{MODERN} {MOE_ALLTOALL} --moe-grouped-gemm {MIXERS}".split(), "--hybrid-layer-pattern", "ME*-GEM-GE*E")
    ours = te_train(2, *JOB, *under(schedule), model=model)
    assert_stocks(ours, te_train.stock(2, *JOB, model=model), shards=False)


def test_a_checkpoint_of_a_v_goes_on_under_stock(te_train: Training, tmp_path: Path) -> None:
    model = hybrid(LETTERS)
    saving = ("--save", str(tmp_path), "--save-interval", "2")
    ours = te_train(2, *JOB, *under("v-half"), *saving, model=model)
    stock = te_train.resume(2, *JOB, *model, load=tmp_path, iteration=2)
    assert stock.losses == ours.losses[2:]


@pytest.mark.nightly
def test_a_job_measures_itself_and_the_next_places_layers_for_that(te_train: Training, tmp_path: Path) -> None:
    model = hybrid(LETTERS)
    job = [*JOB, "--train-iters", "6", "--pipeline-model-parallel-size", "2"]
    measured = te_train(2, *job, *under("v-half"), "--pipeline-measure", f"{tmp_path}:2-4", model=model)
    costs = ["--pipeline-costs", str(tmp_path / "costs.json"), "--pipeline-layers", "auto"]
    planned = te_train(2, *job, *under("v-half"), *costs, model=model)
    replanned = te_train(2, *job, *under("v-half"), "--pipeline-replan", model=model)
    stock = te_train.stock(2, *job, model=model)
    assert len(stock.losses) == 6
    for ours in (measured, planned, replanned):
        assert ours.losses == stock.losses


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("schedule", "pattern"), [("zb-1p", "*E*E|*-*-"), ("zb-1p", "*-*-|*E*E"), ("v-half", "*-|*E|*E|*-")]
)
def test_losses_of_experts_are_logged_where_a_rank_has_none(te: Megatron, schedule: str, pattern: str) -> None:
    """As by one rank without a pipeline: stock's own pipeline stops (docs/upstream.md)."""
    small = [flag for flag in SMALL if flag not in ("--transformer-impl", "local", "--no-gradient-accumulation-fusion")]
    job = [*small, *UNTIED, *f"--bf16 {MODERN} {MOE_ALLTOALL} --moe-grouped-gemm --moe-z-loss-coeff 1e-3".split(), *JOB]
    ours = te("logged", 2, [*job, *under(schedule), "--hybrid-layer-pattern", pattern])
    alone = [*job, "--pipeline-model-parallel-size", "1", "--hybrid-layer-pattern", pattern.replace("|", "")]
    stock = te("logged", 1, alone)
    for name in ("load_balancing_loss", "z_loss", "lm loss"):
        mine, theirs = ([job.scalars[name, step] for step in (1, 2, 3)] for job in (ours, stock))
        assert mine == tolerances.losses(theirs) and all(theirs), name


@pytest.mark.nightly
def test_masks_that_keep_documents_apart_are_not_read(te_train: Training) -> None:
    """Not by stock either, as docs/compatibility.md says: packed samples keep them apart."""
    model = (*MODERN.split(), "--hybrid-layer-pattern", "*-*-*-*-")
    masked = te_train.stock(2, *JOB, "--reset-attention-mask", model=model, samples="documents")
    plain = te_train.stock(2, *JOB, model=model, samples="documents")
    assert masked.losses == plain.losses
    ours = te_train(2, *JOB, "--reset-attention-mask", *under("v-half"), model=model, samples="documents")
    assert ours.losses == plain.losses


def test_a_megatron_that_cannot_log_losses_of_experts_needs_them_on_each_rank() -> None:
    flags = "--pipeline-schedule zb-1p --num-experts 4 --moe-aux-loss-coeff 1e-2 --hybrid-layer-pattern"
    args, _ = stock_parser().parse_known_args(
        [*SMALL, *"--pipeline-model-parallel-size 4".split(), *flags.split(), "*E*E*-*E"]
    )
    args.world_size = 4
    spec = completed(spec_of(args), args)
    plan_job(spec, Machine())
    with pytest.raises(PlanError, match=r"no layer with experts \(E\) on rank 2, and this Megatron logs"):
        plan_job(spec, Machine(logs_unequal=False))
