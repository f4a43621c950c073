"""A microbatch's tokens before its forward: the user's forward step, run until it reaches the embedding."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from megatron.schedules.integration.vocabulary.parts import EmbeddingPart, TokensSeen


class EarlyTokens:
    """Runs the forward step ahead for its tokens, and gives it the same samples when it runs for real.

    Args:
        step: the user's forward step.
        iterator: its samples; None on ranks that get them from another.
        part: the embedding, which stops a forward that runs ahead.
    """

    def __init__(self, step: Callable[..., Any], iterator: Iterator[Any] | None, part: EmbeddingPart) -> None:
        self._step, self._part = step, part
        self._samples = None if iterator is None else _Samples(iterator)

    def read(self, model: torch.nn.Module) -> Tensor:
        """Returns the tokens of the next microbatch, (microbatch, sequence) of this context-parallel rank.

        Raises:
            RuntimeError: the forward step does not call the model's embedding.
        """
        if self._samples is not None:
            self._samples.read_ahead()
        self._part.peeking = True
        try:
            with torch.no_grad():
                self._step(self._samples, model)
        except TokensSeen as seen:
            return seen.tokens
        finally:
            self._part.peeking = False
        raise RuntimeError(
            "the forward step of the first stage did not call the model's embedding, which --pipeline-vocabulary-"
            "parallel needs: leave the flag out"
        )

    def replay(self) -> Iterator[Any] | None:
        """Returns the samples for the forward of the oldest microbatch whose tokens were read."""
        if self._samples is not None:
            self._samples.replay()
        return self._samples


class _Samples:
    """An iterator that remembers what each run ahead has read; its other attributes are the original's."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self._read: deque[deque[Any]] = deque()
        self._replayed: deque[Any] | None = None

    def read_ahead(self) -> None:
        self._read.append(deque())
        self._replayed = None

    def replay(self) -> None:
        self._replayed = self._read.popleft()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._replayed is None:
            self._read[-1].append(next(self._iterator))
            return copy.copy(self._read[-1][-1])  # a step may remove parts of it
        if not self._replayed:
            raise RuntimeError("a forward step read more samples than when it ran ahead for its tokens")
        return self._replayed.popleft()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)
