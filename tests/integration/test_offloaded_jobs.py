"""Activations that go to the host and come back: the gradients of the run in which they stay, to the bit."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest

from megatron.schedules.planner.registry import Request, plan
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.text_forms import to_csv
from tests.integration.features import FULL, MODERN, MOE_ALLTOALL
from tests.integration.results import MODEL, UNTIED
from tests.integration.test_same_result import assert_same_losses, differing
from tests.programs.random_schedules import shared_plan
from tests.support.offloaded import Distances, offloaded
from tests.tiers import by_night, some_by_night

TENSOR = "--tensor-model-parallel-size 2"
DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"
SHARED = "--pipeline-vocabulary-parallel"
JOB = ("--train-iters", "2", "--global-batch-size", "6")


class Setting(NamedTuple):
    """What else is on: processes a pipeline rank, flags, the model's flags."""

    ranks: int = 1
    flags: str = ""
    model: str = ""
    tied: bool = False
    attention: str = "stock"


SETTINGS = {
    "nothing more": Setting(),
    "tied embeddings": Setting(tied=True),
    "tensor parallel": Setting(2, TENSOR),
    "tensor and sequence parallel": Setting(2, f"{TENSOR} --sequence-parallel"),
    "dropout": Setting(flags=DROPOUT),
    "dropout, tensor and sequence parallel": Setting(2, f"{TENSOR} --sequence-parallel {DROPOUT}"),
    "experts": Setting(2, f"{TENSOR} --sequence-parallel", f"{MODERN} {MOE_ALLTOALL}"),
    "bf16": Setting(1, "--bf16"),
    "context parallel": Setting(2, "--context-parallel-size 2", attention="plain"),
    "data parallel, overlapped": Setting(2, "--overlap-grad-reduce --global-batch-size 12"),
    "multi-token prediction": Setting(model="--mtp-num-layers 1 --position-embedding-type rope --no-rope-fusion"),
    "selective recompute": Setting(flags="--recompute-granularity selective"),
    "full recompute of one layer a stage": Setting(flags=f"{FULL} block --recompute-num-layers 1"),
    "vocabulary shared by all ranks": Setting(flags=SHARED),
}
USUAL = (("dropout", "v-half"),)


def here_and_there(stage: int, microbatch: int) -> tuple[int, int] | None:
    """Some stay; of the others some are offloaded for long, and some come back no sooner than they are needed."""
    return None if (stage + microbatch) % 4 == 3 else (microbatch % 3, stage % 3)


def as_file(path: Path, schedule: Schedule, distances: Distances | None = here_and_there) -> tuple[str, ...]:
    """The flags for ``schedule`` given as a CSV, with O and L so placed, or without."""
    path.write_text(to_csv(offloaded(schedule, distances) if distances else schedule))
    return "--pipeline-model-parallel-size", str(schedule.ranks), "--pipeline-schedule", str(path)


@pytest.mark.job
@pytest.mark.parametrize(
    ("setting", "schedule"),
    some_by_night(product(SETTINGS, ("zb-1p", "v-half", "1f1b")), lambda *case: case not in USUAL),
)
def test_gradients_are_those_of_a_run_in_which_all_stays(train, tmp_path, setting, schedule):
    ranks, flags, model, tied, attention = SETTINGS[setting]
    made = shared_plan(schedule, 2, 6) if SHARED in flags else plan(Request(schedule, 2, 6))
    found = [
        train(
            2 * ranks,
            *(*JOB, *flags.split(), *as_file(tmp_path / "schedule.csv", made, distances)),
            model=tuple(model.split()),
            tied=tied,
            attention=attention,
        )
        for distances in (here_and_there, None)
    ]
    assert found[0].losses == found[1].losses and len(found[0].losses) == 2
    assert found[0].evaluations == found[1].evaluations, "nothing goes in an evaluation"
    assert differing(*found) == []


@pytest.mark.nightly
def test_stocks_own_1f1b_has_the_same_gradients(train, tmp_path):
    job = (*JOB, "--pipeline-model-parallel-size", "2")
    ours = train(2, *job, *as_file(tmp_path / "v.csv", plan(Request("v-half", 2, 6))))
    stock = train.stock(2, *job)
    assert_same_losses(ours, stock)
    assert differing(ours, stock) == []


def copied(megatron, path: Path, schedule: Schedule, **how: object):
    flags = [*MODEL, *UNTIED, *JOB, *as_file(path, schedule), "--train-iters", "3", "--eval-iters", "0"]
    return megatron("copied", schedule.ranks, flags, **how)


def test_every_storage_is_copied_once_each_way_into_reused_memory(megatron, tmp_path):
    for iterations in copied(megatron, tmp_path / "v.csv", plan(Request("v-half", 2, 6))):
        assert len(iterations) == 3
        moved, host_bytes = iterations[0]
        assert iterations[1:] == [(moved, host_bytes)] * 2, "each iteration does the same, in the same memory"
        out, back = ([sizes for way, sizes in moved if way == which] for which in ("out", "back"))
        assert sorted(map(tuple, out)) == sorted(map(tuple, back)) and len(out) == 9
        # Each of a stage's two layers saves as much as eighteen hidden states of the small model.
        assert all(sum(sizes) >= 2 * 18 * 16 * 32 * 4 for sizes in out)
        assert host_bytes < sum(map(sum, out)), "not all are offloaded at once"


def test_a_stage_may_offload_some_of_its_layers(megatron, tmp_path):
    """Of four stages with two layers each; a layer saves thirteen storages, and a mask where no data are read."""
    found = copied(megatron, tmp_path / "v.csv", plan(Request("v-half", 2, 6)), layers=(1, 0, 2, 2))
    assert [{len(sizes) for _, sizes in iterations[0][0]} for iterations in found] == [{13, 26}, {28}]


def test_too_little_host_memory_ends_the_job_with_a_reason(megatron, tmp_path):
    with pytest.raises(AssertionError) as caught:
        copied(megatron, tmp_path / "v.csv", plan(Request("v-half", 2, 6)), pinned=300_000)
    (line,) = {line for line in str(caught.value).splitlines() if "OffloadError:" in line}
    assert "microbatch 0: no 0." in line or "microbatch 1: no 0." in line
    assert "of host memory beside the" in line and line.endswith("or give no offload in --pipeline-save-memory")


@pytest.mark.parametrize("schedule", ["1f1b", by_night("zb-1p")])
def test_offloaded_bytes_are_not_held(megatron, tmp_path, schedule):
    """Every microbatch goes as soon as it may and comes back as late, so that a rank holds little more than one."""
    made = plan(Request(schedule, 3, 6))
    flags = "--train-iters 2 --num-layers 12 --hidden-size 64 --seq-length 64 --max-position-embeddings 64".split()
    flags = [*MODEL, *UNTIED, *flags, "--global-batch-size", "6", "--pipeline-measure", str(tmp_path)]
    offloaded, kept = (
        megatron("train", 3, [*flags, *as_file(tmp_path / "schedule.csv", made, distances)]).peaks
        for distances in (lambda stage, microbatch: (0, 0), None)
    )
    assert offloaded[0] <= 1.02 * kept[0] / 3, "of three microbatches one is there"
    assert offloaded[1] <= kept[1]
