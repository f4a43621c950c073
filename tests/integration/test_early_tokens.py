"""The tokens of a microbatch are known before its forward, whatever the step reads and however far ahead it is."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch


@pytest.fixture
def part() -> Any:
    """A rank's part of an embedding, as far as a run ahead asks for it."""
    from megatron.schedules.integration.vocabulary.parts import TokensSeen

    def embed(tokens: torch.Tensor) -> torch.Tensor:
        if made.peeking:
            raise TokensSeen(tokens)
        made.embedded.append(tokens.tolist())
        return tokens

    made = SimpleNamespace(peeking=False, embedded=[], embed=embed)
    return made


def early_tokens(step: Any, samples: Iterator[Any] | None, part: Any) -> Any:
    from megatron.schedules.integration.vocabulary.user_step import EarlyTokens

    return EarlyTokens(step, samples, part)


def step(samples: Any, model: Any) -> Any:
    """Reads two samples for a microbatch and takes the first apart."""
    sample = next(samples)
    tokens = torch.cat([sample.pop("tokens"), next(samples)["tokens"]])
    return model(tokens), None


def test_it_runs_ahead_any_number_of_microbatches_and_each_is_replayed(part):
    samples = ({"tokens": torch.tensor([number])} for number in range(6))
    early = early_tokens(step, samples, part)
    assert [early.read(part.embed).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    step(early.replay(), part.embed)
    assert early.read(part.embed).tolist() == [4, 5]
    for _ in range(2):
        step(early.replay(), part.embed)
    assert part.embedded == [[0, 1], [2, 3], [4, 5]]


def test_a_rank_that_gets_its_samples_from_another_reads_none(part):
    early = early_tokens(lambda samples, model: model(torch.tensor([samples is None])), None, part)
    assert early.read(part.embed).tolist() == [True]
    assert early.replay() is None


def test_what_else_is_asked_of_the_samples_they_answer(part):
    class Loader:
        name = "loader"

        def __next__(self) -> dict[str, torch.Tensor]:
            return {"tokens": torch.tensor([1])}

    early = early_tokens(lambda samples, model: model(torch.tensor([len(samples.name)])), Loader(), part)
    assert early.read(part.embed).tolist() == [6]
    assert not hasattr(early.replay(), "length")


def test_a_step_that_reads_more_the_second_time_is_an_error(part):
    early = early_tokens(step, iter([{"tokens": torch.tensor([number])} for number in range(4)]), part)
    early.read(part.embed)
    samples = early.replay()
    step(samples, part.embed)
    with pytest.raises(RuntimeError, match="read more samples"):
        next(samples)


def test_a_step_without_the_embedding_is_an_error(part):
    with pytest.raises(RuntimeError, match="did not call the model's embedding"):
        early_tokens(lambda samples, model: None, iter([]), part).read(part.embed)
    assert not part.peeking
