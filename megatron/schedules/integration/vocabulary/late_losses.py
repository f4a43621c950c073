"""The user's loss where the losses of tokens come late: after the last stage's forward, before its backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class LateLosses:
    """Catches the function that a forward step gives for its loss, and has stock call it later.

    Args:
        step: the user's forward step.
        calculate: stock's ``forward_step_calc_loss``, given what is the same for all microbatches.
        config: the model's.
        tokens: on which those that count are added up.
    """

    def __init__(self, step: Callable[..., Any], calculate: Callable[..., Any], config: Any, tokens: Tensor) -> None:
        self._user_step, self._calculate, self._config, self._tokens = step, calculate, config, tokens
        self._caught: Any = None

    def step(self, *given: Any) -> tuple[Any, Any]:
        """The user's forward step, with the loss function caught that it returns."""
        output, self._caught = self._user_step(*given)
        return output, self._caught

    def take(self) -> Any:
        """The loss function of the forward that has just run."""
        caught, self._caught = self._caught, None
        return caught

    def report(self, losses: Tensor, loss_function: Any) -> Tensor:
        """Have the loss of a microbatch reported and its tokens counted.

        Args:
            losses: of its tokens, (microbatch, sequence).
            loss_function: the user's, of that microbatch.

        Returns:
            What stock starts a backward from, before it is scaled.
        """
        if self._config.timers is not None:
            self._config.timers("forward-compute", log_level=2).start()  # which stock stops
        output, tokens = self._calculate(output_tensor=losses, loss_func=loss_function)
        self._tokens += tokens
        assert isinstance(output, Tensor)
        return output

    def gradient(self, losses: Tensor, loss_function: Any) -> Tensor:
        """The same; returns the gradient of each token's loss, (microbatch, sequence), scaled as stock scales."""
        leaf = losses.detach().requires_grad_()
        with torch.enable_grad():
            output = self.report(leaf.clone(), loss_function)  # a script may work on it in place
            if self._config.grad_scale_func is not None:
                output = self._config.grad_scale_func(output)
        if output.requires_grad:
            torch.autograd.backward(output)
        return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
