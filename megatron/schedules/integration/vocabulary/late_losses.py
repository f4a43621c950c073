"""The user's loss where the losses of tokens are known only between the last stage's forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


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
        """Has stock report the loss of a microbatch, and counts its tokens.

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
