"""The user's loss is called later than stock would, with what stock would have given it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch


def late(loss: Any, grad_scale: Any = None) -> tuple[Any, list[Any], torch.Tensor]:
    from megatron.schedules.integration.vocabulary.user_step import LateLosses

    reported: list[Any] = []

    def calculate(output_tensor: torch.Tensor, loss_func: Any) -> tuple[torch.Tensor, torch.Tensor]:
        total, count, shown = loss_func(output_tensor)
        reported.append(shown)
        return total / count, count

    tokens = torch.zeros([], dtype=torch.int)
    config = SimpleNamespace(timers=None, grad_scale_func=grad_scale)
    return LateLosses(lambda *given: ("output", loss), calculate, config, tokens), reported, tokens


def masked(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
    mask = torch.tensor([[1.0, 1.0, 0.0]])
    return (losses.mul_(mask)).sum(), mask.sum().int(), float(losses.detach().sum())


def test_each_tokens_gradient_and_the_report():
    made, reported, tokens = late(masked, lambda output: 8 * output)
    assert made.step("samples", "model") == ("output", masked)
    gradient = made.gradient(torch.tensor([[1.0, 2.0, 3.0]]), made.take())
    assert gradient.tolist() == [[4.0, 4.0, 0.0]]
    assert reported == [3.0]
    assert tokens == 2
    assert made.take() is None


def test_a_loss_of_nothing_has_no_gradient():
    made, _, _ = late(lambda losses: (torch.zeros([]), torch.tensor(1), 0.0))
    assert made.gradient(torch.ones(1, 3), made.step()[1]).tolist() == [[0.0, 0.0, 0.0]]
