"""Where a job's vocabulary comes from, before stock knows it: the output layer's share of the work hangs on it."""

from __future__ import annotations

import argparse
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.schedules.estimate.parallel_sizes import ParallelSizes
from megatron.schedules.integration import late_imports
from megatron.schedules.integration.flags.declared import FLAGS, stock_parser
from megatron.schedules.integration.layers import model_shape
from megatron.schedules.job.rules import refusal
from megatron.schedules.job.spec import JobSpec, Settings
from megatron.schedules.job.values import ScheduleChoice
from megatron.schedules.planner.registry import Request, plan

SHAPE = "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --tensor-model-parallel-size 2"


def parsed(flags: str) -> argparse.Namespace:
    return stock_parser().parse_args([*SHAPE.split(), *flags.split()])


def vocabulary(args: Any) -> int:
    shape = model_shape.shape_of(args)
    assert shape is not None
    return shape.vocabulary


def test_a_flag_says_it_and_it_is_padded_as_stock_pads():
    assert vocabulary(parsed("--vocab-size 1000")) == 1024
    assert vocabulary(parsed("--vocab-size 1000 --make-vocab-size-divisible-by 1")) == 1000


def test_what_stock_has_padded_goes_first():
    args = parsed("--vocab-size 1000")
    args.padded_vocab_size = 4096
    assert vocabulary(args) == 4096


def test_a_tokenizer_is_asked_and_stocks_arguments_stay_as_they_were(monkeypatch: pytest.MonkeyPatch):
    args, seen = parsed(""), []

    def build_tokenizer(own: Any) -> Any:
        own.padded_vocab_size = 1
        seen.append(own.rank)
        return SimpleNamespace(vocab_size=5000)

    monkeypatch.setattr(model_shape, "after_megatron", lambda name: SimpleNamespace(build_tokenizer=build_tokenizer))
    assert vocabulary(args) == 5120
    assert seen == [-1]
    assert args.padded_vocab_size is None


def test_a_tokenizer_that_cannot_be_built_leaves_it_open(monkeypatch: pytest.MonkeyPatch):
    def build_tokenizer(own: Any) -> Any:
        raise FileNotFoundError("no such vocabulary")

    monkeypatch.setattr(model_shape, "after_megatron", lambda name: SimpleNamespace(build_tokenizer=build_tokenizer))
    assert vocabulary(parsed("")) == 0


def test_before_megatron_is_imported_nobody_knows(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(late_imports.sys.modules, "megatron.core", raising=False)
    with pytest.raises(late_imports.TooEarlyError):
        model_shape.shape_of(parsed(""))


def test_sizes_left_to_a_checkpoint_leave_the_model_open():
    args = parsed("--vocab-size 1000")
    args.hidden_size = None
    assert model_shape.shape_of(args) is None


@pytest.mark.parametrize(
    ("words", "tensor", "pipeline", "multiple", "padded"),
    [(1024, 2, 8, 128, 1024), (50304, 1, 12, 128, 50304), (50304, 1, 5, 128, 50560), (98, 1, 4, 2, 100)],
)
def test_a_shared_one_has_as_many_words_on_every_rank(words, tensor, pipeline, multiple, padded):
    """No more than stock's own padding where that divides, else the fewest that its padding would give and that do."""
    settings = Settings(ScheduleChoice("1f1b", "1f1b"), vocabulary_parallel=True)
    sizes = ParallelSizes(tensor * pipeline, pipeline, tensor)
    spec = JobSpec(settings, sizes, vocabulary_multiple=multiple, flags=FLAGS)
    assert spec.divisible(words) == padded
    assert padded % (tensor * pipeline) == 0
    schedule = plan(Request("1f1b", pipeline, pipeline))
    assert refusal(spec, schedule) == ""
    assert ("words as padded" in refusal(replace(spec, vocabulary=words), schedule)) == (padded != words)
