"""Schedules with R: the gradients of a run without it, to the bit, and every layer's forward run exactly twice."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import split_helpers as helpers
import split_te_helpers as te_helpers
import torch
from fused_kernels import fused_kernels
from small_gpt import small_gpt
from split_helpers import BATCH, SEQUENCE

from megatron.schedules.planner.registry import Request, plan
from megatron.schedules.runtime.activation_meter import ActivationMeter
from megatron.schedules.runtime.recompute import Recomputes
from megatron.schedules.schedule.kinds import Kind, Pass
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.text_forms import to_csv
from tests.integration.conftest import Training
from tests.integration.features import MODERN, MOE_ALLTOALL
from tests.integration.results import MODEL, UNTIED
from tests.integration.server import Megatron
from tests.integration.test_memory import JOB as SIZE
from tests.integration.test_refusals import JOB, PP4, assert_refused
from tests.integration.test_same_result import CLIP_NOTHING, differing
from tests.programs.random_schedules import shared_plan, with_recompute
from tests.tiers import by_night, some_by_night

# --- layers by themselves -----------------------------------------------------------------------------------------

ORDERS = ("F0 F1 R0 R1 I0 I1 W1 W0", "F0 R0 I0 F1 F2 W0 R2 R1 I1 W1 I2 W2")


def _local(sequence_parallel: bool) -> None:
    for fused, order in itertools.product((False, True), ORDERS):
        with fused_kernels():
            block = helpers.block(sequence_parallel=sequence_parallel, gradient_accumulation_fusion=fused)
            assert helpers.compare(block, order).split == 3


def _te(sequence_parallel: bool) -> None:
    settings = te_helpers.tensor_parallel() | {"sequence_parallel": sequence_parallel}
    for fused, order in itertools.product((False, True), ORDERS):
        block = te_helpers.Block(fuse_wgrad_accumulation=fused, **settings)
        assert te_helpers.compare(block, order).split == 3


@pytest.mark.parametrize(
    ("linears", "tp", "sequence_parallel"),
    [
        (_te, 2, True),
        by_night(_te, 1, False),
        by_night(_local, 2, True),
        by_night(_local, 1, False),
    ],
)
def test_linears_split_in_a_recomputed_forward(te: Megatron, linears: Any, tp: int, sequence_parallel: bool) -> None:
    te("in_groups", tp, linears, sequence_parallel, tensor_model_parallel_size=tp)


def _bytes_and_runs(count: int | None) -> tuple[list[int], list[list[int]]]:
    """Of a small GPT's F, R and I, and of an F without R: bytes held after each; how often each layer was run."""
    from counted_forwards import put_in_place

    from megatron.schedules.integration.model_binding import capture_state, recompute_layers

    runs = put_in_place()
    model, tokens, forward = small_gpt(sequence_parallel=False)
    (x,) = tokens(1)
    meter = ActivationMeter([*model.parameters(), *model.buffers()])
    with meter.recording():
        plain = forward(model, x).sum()
    held = [meter.current]
    del plain
    assert meter.current == 0
    runs.clear()
    recomputes = Recomputes(capture_state)
    which = None if count is None else range(count)
    assert recompute_layers(model, which, recomputes) == (2 if count is None else count)
    with recomputes.forward(0, 0), meter.recording():
        loss = forward(model, x).sum()
    held.append(meter.current)
    with meter.recording():
        recomputes.run(0, 0)
    held.append(meter.current)
    loss.backward()
    held.append(meter.current)
    return held, [runs[number] for number in (1, 2)]


@pytest.mark.parametrize("count", [None, 1])
def test_bytes_held_and_runs_of_a_gpt(count: int | None) -> None:
    ((whole, kept, made, after), runs) = helpers.run_ranks(1, _bytes_and_runs, count)[0]
    assert made == whole and after == 0
    # Beside the layers the embedding, the last norm and the output layer hold something.
    assert kept < whole * (0.6 if count is None else 0.8)
    assert runs == ([[1, 1], [1, 1]] if count is None else [[1, 1], [0, 1]])


def _inputs_alone() -> tuple[int, int]:
    from megatron.schedules.integration.model_binding import capture_state, recompute_layers

    model, _, _ = small_gpt(sequence_parallel=False)
    recomputes = Recomputes(capture_state)
    recompute_layers(model, None, recomputes)
    meter = ActivationMeter(model.parameters())
    hidden = torch.randn(SEQUENCE, BATCH, 8, requires_grad=True)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE).triu(1).bool()
    with recomputes.forward(0, 0), meter.recording():
        output, context = model.decoder.layers[0](hidden_states=hidden, attention_mask=mask)
    assert context is None and output.requires_grad
    return meter.current, hidden.untyped_storage().nbytes() + mask.untyped_storage().nbytes()


def test_f_holds_a_layers_inputs_alone() -> None:
    held, inputs = helpers.run_ranks(1, _inputs_alone)[0]
    assert held == inputs


# --- whole jobs ---------------------------------------------------------------------------------------------------

TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"
BIAS = "--moe-router-score-function sigmoid --moe-router-enable-expert-bias"
FOUR_OF_EIGHT = MOE_ALLTOALL.replace("topk 2", "topk 4").replace("experts 4", "experts 8")
OVERLAPPED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
# Ranks, the schedule that gets R, flags of the model, other flags, and the keyword arguments of the job.
SETTINGS: dict[str, tuple[int, str, str, str, dict[str, Any]]] = {
    "dropout, tensor and sequence parallel": (4, "v-half", "", f"{DROPOUT} {TP2}", {}),
    "dropout": (2, "zb-1p", "", DROPOUT, {}),
    "tensor parallel": (4, "zb-1p", "", "--tensor-model-parallel-size 2", {}),
    "whole backwards": (2, "1f1b", "", "", {}),
    "experts": (2, "v-half", f"{MODERN} {FOUR_OF_EIGHT} {BIAS} --moe-z-loss-coeff 1e-3", "", {}),
    "experts, whole backwards": (2, "1f1b-v", f"{MODERN} {MOE_ALLTOALL}", "", {}),
    "context parallel": (4, "v-zb", "", "--context-parallel-size 2", {"attention": "plain"}),
    "tied embeddings": (2, "v-half", "", "", {"tied": True}),
    "multi-token prediction": (
        2,
        "v-half",
        "--mtp-num-layers 1 --position-embedding-type rope --no-rope-fusion",
        "",
        {},
    ),
    "bf16": (2, "v-half", "", "--bf16", {}),
    "selective recompute": (2, "v-half", "", "--recompute-granularity selective", {}),
    "adapters, the model frozen": (2, "v-half", "", "--dist-ckpt-strictness ignore_all", {"adapters": True}),
    "distributed optimizer, overlapped": (4, "v-half", "", OVERLAPPED, {}),
    "a shared vocabulary": (2, "v-half", "", "--pipeline-vocabulary-parallel", {}),
}
USUAL = ("experts",)


def _file(path: Path, schedule: Schedule) -> tuple[str, ...]:
    path.write_text(to_csv(schedule))
    return "--pipeline-schedule", str(path)


def _with_recompute(schedule: Schedule, share: float = 0.7) -> Schedule:
    draw = random.Random(3)
    return replace(schedule, order=tuple(tuple(with_recompute(row, share, draw)) for row in schedule.order))


@pytest.mark.job
@pytest.mark.parametrize("setting", some_by_night(SETTINGS, lambda name: name not in USUAL))
def test_the_result_is_that_without_r(train: Training, tmp_path: Path, setting: str) -> None:
    """To the bit, weights after two steps too; R of most microbatches, anywhere between F and I."""
    world, name, model, flags, more = SETTINGS[setting]
    shared = "--pipeline-vocabulary-parallel" in flags
    made = shared_plan(name, 2, 5) if shared else plan(Request(name, 2, 5))
    job = ("--train-iters", "2", "--global-batch-size", "10" if OVERLAPPED in flags else "5")
    job += ("--pipeline-model-parallel-size", "2", *CLIP_NOTHING, *flags.split())
    model_flags = tuple(model.split())
    plain = train(world, *job, *_file(tmp_path / "plain.csv", made), model=model_flags, **more)
    ours = train(world, *job, *_file(tmp_path / "recompute.csv", _with_recompute(made)), model=model_flags, **more)
    assert len(plain.losses) == len(plain.evaluations) == 2
    assert ours.losses == plain.losses and ours.evaluations == plain.evaluations
    assert OVERLAPPED in flags or differing(ours, plain) == []
    assert [str(key) for key, value in plain.weights.items() if not torch.equal(value, ours.weights[key])] == []


@pytest.mark.nightly
def test_the_result_is_stocks(train: Training, tmp_path: Path) -> None:
    job = ("--train-iters", "2", "--global-batch-size", "8", "--pipeline-model-parallel-size", "2", *CLIP_NOTHING)
    ours = train(2, *job, *_file(tmp_path / "recompute.csv", _with_recompute(plan(Request("v-half", 2, 8)))))
    stock = train.stock(2, *job)
    assert differing(ours, stock) == []


def test_every_layer_runs_as_often_as_it_must(megatron: Any, tmp_path: Path) -> None:
    """Stage 1 recomputes all microbatches, stage 0 only two; evaluation none. Eight layers on two ranks."""
    order = []
    for rank, row in enumerate(plan(Request("1f1b", 2, 4)).order):
        recomputed = {(1, m) for m in range(4)} if rank else {(0, 0), (0, 2)}
        passes: list[Pass] = []
        for work in row:
            if work.kind is Kind.B and (work.stage, work.microbatch) in recomputed:
                passes.append(work._replace(kind=Kind.R))
            passes.append(work)
        order.append(tuple(passes))
    flags = _file(tmp_path / "recompute.csv", replace(plan(Request("1f1b", 2, 4)), order=tuple(order)))
    job = ["--train-iters", "1", "--global-batch-size", "4", "--pipeline-model-parallel-size", "2"]
    runs = megatron("layer_runs", 2, [*MODEL, *UNTIED, *job, *flags])
    evaluated = 2 * 4  # validation and test
    assert runs == {n: [evaluated + 2, 4] if n <= 4 else [evaluated + 4, 4] for n in range(1, 9)}


def _right_before(schedule: Schedule) -> Schedule:
    """With an R of every microbatch right before its I or B."""
    rows = []
    for row in schedule.order:
        passes: list[Pass] = []
        for work in row:
            passes += [work._replace(kind=Kind.R)] * (work.kind in (Kind.I, Kind.B)) + [work]
        rows.append(tuple(passes))
    return replace(schedule, order=tuple(rows))


@pytest.mark.nightly
def test_a_rank_holds_one_microbatch_and_inputs_of_the_others(megatron: Any, tmp_path: Path) -> None:
    """1F1B on four ranks; four layers a rank, whose inputs are 64 x 1 x 64 numbers of four bytes."""
    common = [*MODEL, *UNTIED, *SIZE, "--pipeline-model-parallel-size", "4"]
    common += ["--pipeline-measure", str(tmp_path / "measured")]
    one = megatron("train", 4, [*common, "--global-batch-size", "1", "--pipeline-schedule", "1f1b"]).peaks
    flags = _file(tmp_path / "recompute.csv", _right_before(plan(Request("1f1b", 4, 4))))
    peaks = megatron("train", 4, [*common, "--global-batch-size", "4", *flags]).peaks
    inputs = 4 * 64 * 64 * 4
    for rank, (peak, alone) in enumerate(zip(peaks, one, strict=True)):
        # The first rank's words and positions, and the attention mask, are of a few KiB.
        assert peak == pytest.approx(alone + (3 - rank) * inputs, rel=0.02)


def test_nothing_waits_for_the_device(megatron: Any, tmp_path: Path) -> None:
    flags = ["--train-iters", "2", "--global-batch-size", "4", "--pipeline-model-parallel-size", "2", *DROPOUT.split()]
    flags += [
        "--timing-log-level",
        "2",
        *_file(tmp_path / "recompute.csv", _with_recompute(plan(Request("v-half", 2, 4)))),
    ]
    assert megatron("waits", 2, [*MODEL, *UNTIED, *flags]) == [[], []]


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
            "both recompute whole layers",
        ),
        ("--te-rng-tracker", "with recompute passes (R) does not work with --te-rng-tracker: its random states"),
        (
            "--fp8-format e4m3",
            "with recompute passes (R) does not work with --fp8-recipe delayed: scales change",
        ),
    ],
)
def test_what_does_not_go_with_r_is_refused_in_a_line(megatron: Any, tmp_path: Path, flags: str, part: str) -> None:
    asked = _file(tmp_path / "recompute.csv", _with_recompute(plan(Request("1f1b", 4, 4))))
    assert_refused(megatron("outputs", 4, [*JOB, *PP4, *asked, *flags.split()]), part)
