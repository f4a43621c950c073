"""The words of a microbatch before its forward: the user's forward step, run until it comes to the embedding."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from megatron.schedules.integration.vocabulary.parts import EmbeddingPart, WordsSeen


class Ahead:
    """Gives a forward step that ran ahead the same samples again when it runs for real.

    Args:
        step: the user's forward step.
        iterator: what it reads; None on ranks that get their samples from another.
        part: where a forward comes to the embedding.
    """

    def __init__(self, step: Callable[..., Any], iterator: Iterator[Any] | None, part: EmbeddingPart) -> None:
        self._step, self._part = step, part
        self._samples = None if iterator is None else _Samples(iterator)

    def words(self, model: torch.nn.Module) -> Tensor:
        """Those of the next microbatch, (microbatch, sequence) of this context-parallel rank.

        Raises:
            RuntimeError: where the forward step does not come to the model's embedding.
        """
        if self._samples is not None:
            self._samples.read_ahead()
        self._part.peeking = True
        try:
            with torch.no_grad():
                self._step(self._samples, model)
        except WordsSeen as seen:
            return seen.words
        finally:
            self._part.peeking = False
        raise RuntimeError(
            "the forward step of the first stage did not call the model's embedding, which --pipeline-vocabulary-"
            "parallel needs: leave the flag out"
        )

    def again(self) -> Iterator[Any] | None:
        """What the forward of the microbatch reads that has waited longest since its words were known."""
        if self._samples is not None:
            self._samples.give_again()
        return self._samples


class _Samples:
    """An iterator that remembers what each run ahead has read. What else one asks is the original's to answer."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self._read: deque[deque[Any]] = deque()
        self._giving: deque[Any] | None = None

    def read_ahead(self) -> None:
        self._read.append(deque())
        self._giving = None

    def give_again(self) -> None:
        self._giving = self._read.popleft()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._giving is None:
            self._read[-1].append(next(self._iterator))
            return copy.copy(self._read[-1][-1])  # which a step may take apart
        if not self._giving:
            raise RuntimeError("a forward step read more samples than it did when it ran ahead for its words")
        return self._giving.popleft()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)
