"""The user's forward step under vocabulary parallelism: its tokens before it runs, and its loss after it.

It runs ahead for a microbatch's tokens until it reaches the embedding. The losses of tokens are known only between the
last stage's forward and backward.
"""

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


class LateLosses:
    """Takes the loss function that a forward step returns, and has stock call it later.

    Args:
        step: the user's forward step.
        calculate: stock's ``forward_step_calc_loss``, with the arguments that all microbatches share.
        config: the model's.
        token_count: the number of tokens that count is added to it.
    """

    def __init__(
        self, step: Callable[..., Any], calculate: Callable[..., Any], config: Any, token_count: Tensor
    ) -> None:
        self._user_step, self._calculate, self._config, self._token_count = step, calculate, config, token_count
        self._loss_function: Any = None

    def step(self, *args: Any) -> tuple[Any, Any]:
        """Runs the user's forward step and remembers the loss function that it returns."""
        output, self._loss_function = self._user_step(*args)
        return output, self._loss_function

    def take(self) -> Any:
        """Returns the loss function of the forward that has just run."""
        loss_function, self._loss_function = self._loss_function, None
        return loss_function

    def report(self, losses: Tensor, loss_function: Any) -> Tensor:
        """Lets stock report the loss of a microbatch, and counts its tokens.

        Args:
            losses: of its tokens, (microbatch, sequence).
            loss_function: the user's, of that microbatch.

        Returns:
            The tensor from which stock starts a backward, before it is scaled.
        """
        if self._config.timers is not None:
            self._config.timers("forward-compute", log_level=2).start()  # which stock stops
        output, tokens = self._calculate(output_tensor=losses, loss_func=loss_function)
        self._token_count += tokens
        assert isinstance(output, Tensor)
        return output

    def gradient(self, losses: Tensor, loss_function: Any) -> Tensor:
        """As :meth:`report`; returns the gradient of each token's loss, (microbatch, sequence), scaled as by stock."""
        leaf = losses.detach().requires_grad_()
        with torch.enable_grad():
            output = self.report(leaf.clone(), loss_function)  # a script may modify it in place
            if self._config.grad_scale_func is not None:
                output = self._config.grad_scale_func(output)
        if output.requires_grad:
            torch.autograd.backward(output)
        return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
