"""Each bucket of gradients is reduced once its own are complete, while its chunk's others and the rest go on."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.integration.features import each_schedule
from tests.integration.results import MODEL, UNTIED
from tests.integration.server import Megatron
from tests.integration.test_same_result import CLIP_NOTHING, assert_same_losses, differing, under

OVERLAPPED = "--pipeline-model-parallel-size 2 --overlap-grad-reduce --ddp-bucket-size 4000".split()
JOB = "--train-iters 1 --global-batch-size 8 --eval-iters 0".split()


@pytest.mark.job
@pytest.mark.feature("each bucket's reduction starts within its chunk's last pass")
@pytest.mark.parametrize("schedule", each_schedule("v-half"))
def test_reductions_start_within_the_chunks_last_pass(megatron: Megatron, schedule: str) -> None:
    """Stock has several buckets in the first rank's first chunk, and one in each other."""
    ranks = megatron("reductions", 4, [*MODEL, *UNTIED, *JOB, *OVERLAPPED, *under(schedule, "1")])
    assert all(actions.count(("reduce", 0)) > 1 for actions in ranks[:2])
    for actions in ranks:
        for chunk in {chunk for _, chunk in actions}:
            at = [index for index, action in enumerate(actions) if action == ("reduce", chunk)]
            begun = max(index for index, action in enumerate(actions) if action in (("W", chunk), ("B", chunk)))
            ended = begun + actions[begun:].index((f"end of {actions[begun][0]}", chunk))
            assert at and all(begun < index < ended for index in at), "neither before it nor after it"
            assert not any(action[1] == chunk for action in actions[ended + 1 :]), "and it is the last"


@pytest.mark.parametrize("schedule", ["zb-1p", "v-half", "1f1b"])
def test_buckets_with_a_part_of_the_vocabulary_wait_for_it_alone(megatron: Megatron, schedule: str) -> None:
    """On the first rank, which has several in its first chunk, the others have started already."""
    flags = [*JOB, *OVERLAPPED, *under(schedule), "--pipeline-vocabulary-parallel"]
    for rank, actions in enumerate(megatron("reductions", 4, [*MODEL, *UNTIED, *flags])):
        added = max(index for index, action in enumerate(actions) if action == ("ADD", 0))
        begun = max(index for index, action in enumerate(actions) if action in (("W", 0), ("B", 0)))
        at = [index for index, action in enumerate(actions) if action == ("reduce", 0)]
        assert added < max(at)
        assert begun < min(at) < (added if rank < 2 else len(actions))


@pytest.mark.job
@pytest.mark.parametrize("schedule", each_schedule("zb-1p"))
def test_gradients_are_stocks_with_many_buckets(train: Any, schedule: str) -> None:
    job = ("--train-iters", "3", "--global-batch-size", "8", *OVERLAPPED)
    ours, stock = train(4, *job, *under(schedule)), train.stock(4, *job)
    assert_same_losses(ours, stock)
    assert differing(ours, stock) == []


@pytest.mark.parametrize("schedule", each_schedule("zb-1p", "v-half"))
def test_weights_are_stocks_with_many_buckets(train: Any, schedule: str) -> None:
    """Of the gradients each rank of a distributed optimizer keeps a shard only."""
    job = ("--train-iters", "3", "--global-batch-size", "8", *OVERLAPPED, *CLIP_NOTHING)
    job += ("--use-distributed-optimizer", "--overlap-param-gather")
    ours, stock = train(4, *job, *under(schedule)), train.stock(4, *job)
    assert_same_losses(ours, stock)
    assert ours.weights.keys() == stock.weights.keys()
    assert [str(k) for k, v in stock.weights.items() if not torch.equal(v, ours.weights[k])] == []


@pytest.mark.parametrize("schedule", each_schedule("v-half"))
def test_gradients_summed_in_fp32_lead_to_stocks_weights(train: Any, schedule: str) -> None:
    """In bf16 they are rounded once. The tied output layer is in a bucket of its own, in the last chunk as well."""
    job = ("--train-iters", "2", "--global-batch-size", "4", *OVERLAPPED, *CLIP_NOTHING, "--bf16")
    job += ("--grad-reduce-in-bf16", "--use-distributed-optimizer", "--ddp-reduce-scatter-with-fp32-accumulation")
    ours, stock = train(4, *job, *under(schedule), tied=True), train.stock(4, *job, tied=True)
    assert_same_losses(ours, stock)
    assert ours.weights.keys() == stock.weights.keys()
    assert [str(k) for k, v in stock.weights.items() if not torch.equal(v, ours.weights[k])] == []


class Group:
    """A bucket group of Megatron's, as far as it is used."""

    def __init__(self, name: str, started: list[str], *parameters: str) -> None:
        self.name, self.params, self._started = name, set(parameters), started
        self.is_first_batch = True

    def start_grad_sync(self, *, force_all_reduce: bool) -> None:
        self._started.append(f"{self.name} as a whole" if force_all_reduce else self.name)

    def register_grad_ready(self, parameter: str) -> None:
        raise AssertionError("stock's own count")


@pytest.fixture
def started() -> list[str]:
    return []


@pytest.fixture
def chunk(started: list[str]) -> SimpleNamespace:
    dense = [Group("0", started, "a", "b"), Group("1", started, "c"), Group("2", started, "d", "e")]
    experts = [Group("3", started, "f")]
    return SimpleNamespace(bucket_groups=dense, expert_parallel_bucket_groups=experts, force_all_reduce=False)


@pytest.fixture
def reduction(chunk: SimpleNamespace) -> Iterator[Any]:
    from megatron.schedules.integration.gradient_reduction import GradientReduction

    made = GradientReduction([chunk], overlapped=True)
    # As long as it is set stock reduces again at the end what it holds no handle of: instances of the optimizer do not.
    assert not any(group.is_first_batch for group in chunk.bucket_groups)
    yield made
    made.close()
    with pytest.raises(AssertionError, match="stock's own count"):
        chunk.bucket_groups[0].register_grad_ready("a")


def arrive(chunk: SimpleNamespace, parameters: str) -> None:
    groups = [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]
    for parameter in parameters:
        next(group for group in groups if parameter in group.params).register_grad_ready(parameter)


def test_a_bucket_starts_with_its_last_gradient(reduction: Any, chunk: SimpleNamespace, started: list[str]) -> None:
    arrive(chunk, "abcdef")  # earlier microbatches
    reduction.begin_pass()
    assert started == []
    reduction.completing(0, {"a", "b", "d"}, passes_left=3)
    arrive(chunk, "a")
    assert started == []
    arrive(chunk, "b")
    assert started == ["0", "1"], "the second had all before this pass"
    arrive(chunk, "d")
    assert started == ["0", "1", "2", "3"]
    reduction.complete(0)
    reduction.finish()
    assert started == ["0", "1", "2", "3"], "each once"


def test_buckets_start_in_one_order_on_all_ranks(reduction: Any, chunk: SimpleNamespace, started: list[str]) -> None:
    """An expert without a token has its gradient early on some ranks; collectives in two orders would hang."""
    reduction.completing(0, None, passes_left=3)
    arrive(chunk, "fdec")
    assert started == []
    arrive(chunk, "ab")
    assert started == ["0", "1", "2", "3"]


def test_a_bucket_whose_last_gradient_comes_later_waits_for_it_alone(
    reduction: Any, chunk: SimpleNamespace, started: list[str]
) -> None:
    """Its gradients of earlier microbatches, which come meanwhile, are not the last."""
    reduction.completing(0, {"a", "b", "d"}, passes_left=3, later={"c"})
    arrive(chunk, "abcd")
    assert started == ["0", "2", "3"]
    arrive(chunk, "c")
    reduction.arriving({"c"})
    assert started == ["0", "2", "3"]
    arrive(chunk, "c")
    assert started == ["0", "2", "3", "1"]
    reduction.complete(0)
    assert started == ["0", "2", "3", "1"], "each once"


def test_what_gets_no_gradient_does_not_hold_it_up(reduction: Any, chunk: SimpleNamespace, started: list[str]) -> None:
    chunk.force_all_reduce = True
    reduction.completing(0, None, passes_left=3)
    reduction.complete(0)
    assert started == [f"{number} as a whole" for number in range(4)]


@pytest.mark.parametrize(("passes_left", "in_each"), [(0, [4]), (1, [2, 2]), (2, [2, 2]), (3, [1] * 4), (4, [1] * 4)])
def test_one_queue_is_not_filled_with_buckets(
    monkeypatch: pytest.MonkeyPatch, chunk: SimpleNamespace, started: list[str], passes_left: int, in_each: list[int]
) -> None:
    """They are spread over the passes that remain: with all at once the next pass would wait for all but the last."""
    from megatron.schedules.integration.gradient_reduction import GradientReduction

    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    reduction = GradientReduction([chunk], overlapped=True)
    reduction.completing(0, None, passes_left=passes_left)
    arrive(chunk, "abcdef")
    reduction.complete(0)
    for _ in range(passes_left):
        started.append("next pass")
        reduction.begin_pass()
    reduction.finish()
    passes = [list(names) for new, names in groupby(started, lambda name: name == "next pass") if not new]
    assert [len(names) for names in passes] == in_each
    assert [name for name in started if name != "next pass"] == ["0", "1", "2", "3"]


def test_buckets_that_are_left_when_passes_end_start_then(
    monkeypatch: pytest.MonkeyPatch, chunk: SimpleNamespace, started: list[str]
) -> None:
    from megatron.schedules.integration.gradient_reduction import GradientReduction

    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    reduction = GradientReduction([chunk], overlapped=True)
    reduction.completing(0, None, passes_left=3)
    arrive(chunk, "abcdef")
    reduction.complete(0)
    assert started == ["0"], "one in each of the passes that were announced"
    reduction.finish()
    assert started == ["0", "1", "2", "3"]
