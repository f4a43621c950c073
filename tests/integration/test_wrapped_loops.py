"""Loops of one's own whose model is wrapped or was built too early: right gradients, or a refusal."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.schedules.planner.registry import NAMES, splits
from tests.integration.results import MODEL, UNTIED, Call
from tests.tiers import by_night

CALLS = (Call(3, seed=1),)
MEGATRONS = "wrap the model in megatron.core.distributed.DistributedDataParallel instead"
WHOLE = [name for name in NAMES if not splits(name)]
FSDP2 = ("fully_shard", "fully_shard on one rank", "fully_shard of a part")
IN_ORDER = {
    "torch's DistributedDataParallel": "torch's DistributedDataParallel, ",
    "torch's DistributedDataParallel of a part": "torch's DistributedDataParallel of decoder.layers.0.mlp, ",
    "torch's DistributedDataParallel and no_sync_func": "torch's DistributedDataParallel, ",
    "torch's FullyShardedDataParallel": "torch's FullyShardedDataParallel, ",
    "replicate": "torch's replicate, ",
    "an engine": "tests's Engine, ",
    "an engine with no_sync": "tests's SwitchedEngine, ",
    "no module": "tests's Outside, ",
}
UNCHANGED = ("nothing", "checkpoint_wrapper", "a user's part", "a user's module", "a user's module around Megatron's")


def refusals(megatron: Any, cases: list[tuple[str, str]], **options: Any) -> list[str]:
    """The line with which each of ``cases`` is refused, on both ranks with status 2, said by the first."""
    first, second = megatron("wrapped_loops", cases, CALLS, **options)
    assert [each.status for each in (*first, *second)] == [2] * 2 * len(cases), (first, second)
    lines = []
    for one, other in zip(first, second, strict=True):
        line = [each for each in one.said.splitlines() if " error: " in each]
        assert len(line) == 1 and " error: " not in other.said
        lines.append(line[0].partition(" error: ")[2])
    return lines


def assert_same_gradients(ours: list[Any], stock: list[Any]) -> None:
    found, expected = ({k: v for rank in ranks for k, v in rank.done[0].gradients.items()} for ranks in (ours, stock))
    assert found.keys() == expected.keys() and len(found) > 8
    assert [name for name, gradient in expected.items() if not torch.equal(found[name], gradient)] == []


@pytest.mark.job
@pytest.mark.parametrize(("schedule", "chunks"), [("zb-1p", 1), ("v-half", 2)])
def test_wrappers_that_count_on_whole_backwards_are_refused_by_name_on_all_ranks(
    megatron: Any, schedule: str, chunks: int
) -> None:
    cases = [(wrapper, schedule) for wrapper in (*FSDP2, *IN_ORDER)]
    lines = refusals(megatron, cases, chunks=chunks)
    for wrapper, line in zip((*FSDP2, *IN_ORDER), lines, strict=True):
        assert line.startswith(f"--pipeline-schedule {schedule} does not work with ") and MEGATRONS in line
        assert IN_ORDER.get(wrapper, "torch's fully_shard") in line
        assert line.endswith(f", or use {' or '.join(WHOLE)}") == (wrapper in FSDP2)


@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "1f1b-v"])
def test_torchs_data_parallelism_is_refused_with_several_chunks_also_if_backwards_are_whole(
    megatron: Any, schedule: str
) -> None:
    (line,) = refusals(megatron, [("torch's DistributedDataParallel", schedule)], chunks=2)
    assert "torch's DistributedDataParallel, which expects stock's order of passes" in line and line.endswith(MEGATRONS)


def test_a_part_that_a_script_of_megatron_lms_wraps_is_refused_too(megatron: Any) -> None:
    flags = [*MODEL, *UNTIED, "--pipeline-model-parallel-size", "2", "--train-iters", "1", "--global-batch-size", "4"]
    flags += ["--pipeline-schedule", "zb-1p"]
    (status, said), (other, _) = megatron("wrapped_outputs", 2, flags, "torch's DistributedDataParallel of a part")
    assert (status, other) == (2, 2)
    assert "error: --pipeline-schedule zb-1p does not work with torch's DistributedDataParallel of " in said


def test_a_no_sync_func_that_would_do_nothing_is_refused(megatron: Any) -> None:
    (line,) = refusals(megatron, [("torch's DistributedDataParallel and no_sync_func", "1f1b")])
    assert "no_sync_func" in line and "megatron.core.distributed.DistributedDataParallel" in line


def test_wrappers_are_left_alone_by_schedules_under_which_gradients_are_stocks(megatron: Any) -> None:
    cases = [(wrapper, schedule) for wrapper in FSDP2 for schedule in WHOLE]
    cases += [("torch's DistributedDataParallel", "1f1b")]
    assert megatron("passing", cases) == [True] * len(cases)


@pytest.mark.job
@pytest.mark.parametrize(("schedule", "chunks"), [by_night("zb-1p", 1), ("v-half", 2)])
def test_modules_that_reduce_nothing_and_megatrons_own_wrapper_inside_them_train_alike(
    megatron: Any, schedule: str, chunks: int
) -> None:
    stock = megatron("wrapped_loops", [(wrapper, None) for wrapper in UNCHANGED], CALLS)
    ours = megatron("wrapped_loops", [(wrapper, schedule) for wrapper in UNCHANGED], CALLS, chunks=chunks)
    for at in range(len(UNCHANGED)):
        assert all(rank[at].status == 0 for rank in ours), [rank[at].said for rank in ours]
        assert any("W" in rank[at].done[0].passes for rank in ours)
        assert_same_gradients([rank[at] for rank in ours], [rank[at] for rank in stock])


@pytest.mark.parametrize("schedule", ["v-half", "1f1b-v", "auto"])
def test_install_after_the_model_was_built_is_refused_where_layers_would_be_elsewhere(
    megatron: Any, schedule: str
) -> None:
    (line,) = refusals(megatron, [("nothing", schedule)], chunks=2, late=True)
    assert line.startswith(f"--pipeline-schedule {schedule} places layers itself, ")
    assert "megatron.schedules.install() came too late" in line


@pytest.mark.parametrize(("schedule", "chunks"), [("zb-1p", 1), ("interleaved-1f1b", 2)])
def test_install_after_the_model_was_built_trains_alike_where_layers_stay(
    megatron: Any, schedule: str, chunks: int
) -> None:
    stock = megatron("wrapped_loops", [("nothing", None)], CALLS)
    ours = megatron("wrapped_loops", [("nothing", schedule)], CALLS, chunks=chunks, late=True)
    assert_same_gradients([rank[0] for rank in ours], [rank[0] for rank in stock])
