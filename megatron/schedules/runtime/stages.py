"""What the engine asks of the model: the passes of the stages a rank holds."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Stages(Protocol):
    """The stages of one rank, ready to compute.

    Every tensor handed in is a leaf without history. It may share its storage with another stage's output on
    the same rank, so it must not be written to; ``requires_grad_()`` on it is allowed. What is returned may
    carry history; the engine keeps a detached alias, so a stage is free to drop the data of its own output
    tensor afterwards.
    """

    def forward(self, stage: int, microbatch: int, activation: Tensor | None, *, split: bool) -> Tensor | None:
        """F. ``activation`` is None on stage 0; returns the output, which the last stage may leave out.

        ``split`` says that the backward of this stage and microbatch will come as I and W rather than as B
        (false as well where none will come).
        """
        ...

    def backward(self, stage: int, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        """B, the whole backward: from the output's gradient (last stage: None) to the input's (stage 0: None)."""
        ...

    def backward_input(self, stage: int, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        """I, the first half: takes and returns what :meth:`backward` does, and leaves the weights for W."""
        ...

    def backward_weight(self, stage: int, microbatch: int) -> None:
        """W, the second half: adds to the weights' gradients and lets go of all the microbatch still held."""
        ...

    def reduce_gradients(self, stage: int) -> None:
        """The stage's gradients are complete: let their data-parallel reduction start, and overlap what follows."""
        ...
