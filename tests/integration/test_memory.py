"""Memory is real: bytes of activations held during a run, against the plan."""

from __future__ import annotations

from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
import torch

from megatron.schedules.planner.registry import Request, plan
from tests.integration.results import MODEL, UNTIED
from tests.tiers import by_night

JOB = "--train-iters 2 --num-layers 16 --hidden-size 64 --seq-length 64 --max-position-embeddings 64".split()


def held(megatron, schedule: str, size: int, *more: str) -> list[int]:
    """The most bytes each rank held."""
    flags = ["--global-batch-size", str(2 * size), "--pipeline-model-parallel-size", str(size)]
    with TemporaryDirectory(prefix="measured-") as folder:
        flags += ["--pipeline-schedule", schedule, "--pipeline-measure", folder]
        return megatron("train", size, [*MODEL, *UNTIED, *JOB, *flags, *more]).peaks


def planned(schedule: str, size: int) -> float:
    """The most any rank holds by plan, in microbatches."""
    made = plan(Request(schedule, size, 2 * size))
    share = 1 / made.placement.chunks
    return max(_peak(row, share) for row in made.order)


def _peak(row, share: float) -> float:
    level = highest = 0.0
    for work in row:
        level += share * {"F": 1, "I": 0, "W": -1, "B": -1}[str(work.kind)]
        highest = max(highest, level)
    return highest


@pytest.mark.nightly
@pytest.mark.parametrize("size", [4, by_night(8)])
def test_bytes_held_rank_as_planned(megatron, size):
    names = ("1f1b", "v-min", "v-half", "v-zb")
    worst = {name: max(held(megatron, name, size)) for name in names}
    assert worst["v-min"] < worst["v-half"] < worst["v-zb"]
    for name in names:
        share = planned(name, size) / planned("1f1b", size)
        assert worst[name] / worst["1f1b"] == pytest.approx(share, rel=0.1), name


@pytest.mark.parametrize("limit", ["0.5", *(by_night(x) for x in ("0.75", "1"))])
def test_an_adaptive_plan_keeps_to_the_memory_it_was_given(megatron, limit):
    """A chunk's own share is not exact: embedding, output layer and loss hold something too."""
    baseline = max(held(megatron, "1f1b", 4))
    worst = max(held(megatron, "adaptive", 4, "--pipeline-memory-limit", limit))
    assert worst / baseline <= 1.1 * float(limit)


def test_memory_stays_flat_over_100_iterations(megatron):
    flags = "--global-batch-size 4 --pipeline-model-parallel-size 2 --pipeline-schedule v-half --num-layers 4".split()
    for sizes in megatron("live_bytes", 2, [*MODEL, *UNTIED, *flags, "--train-iters", "100"]):
        assert len(sizes) == 10
        # The first iterations make the optimizer's state and fill caches.
        assert max(sizes) <= sizes[0], f"bytes of tensors after every tenth iteration: {sizes}"


def test_measuring_ends_with_its_report(megatron, tmp_path):
    flags = "--global-batch-size 4 --pipeline-model-parallel-size 2 --pipeline-schedule v-half --train-iters 3".split()
    flags += ["--pipeline-measure", f"{tmp_path}:1-3", "--eval-iters", "0"]
    assert megatron("counted", 2, [*MODEL, *UNTIED, *flags]) == [[True, False, False]] * 2


def test_on_a_gpu_its_allocator_is_asked(monkeypatch):
    from megatron.schedules.integration.cpu import standin
    from megatron.schedules.integration.rank_device import PeakReport

    allocated = {"now": 100, "most": 5000}
    monkeypatch.setattr(standin, "enabled", lambda: False)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: allocated.update(most=allocated["now"]))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: allocated["now"])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: allocated["most"])
    monkeypatch.setattr(torch.distributed, "all_gather_object", lambda found, own, group: found.append(own))
    said: list[str] = []
    report = PeakReport(SimpleNamespace(size=lambda: 0), next_call=True, say=said.append)
    assert report.begin([]) is None, "nothing is counted tensor by tensor"
    allocated.update(now=150, most=170)
    report.end()
    assert report.bytes == 70
    assert len(said) == 1 and said[0].endswith("worst 70 bytes")
