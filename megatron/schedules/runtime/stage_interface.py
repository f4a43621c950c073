"""What the engine asks of the model: the passes of the stages a rank holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from megatron.schedules.runtime.program import Op, ProgramError


class Stages(Protocol):
    """The stages of one rank, ready to compute.

    Every tensor handed in is a leaf without history. It may share its storage with another stage's output on
    the same rank, so it must not be written to; ``requires_grad_()`` on it is allowed. What is returned may
    carry history; the engine keeps a detached alias, so a stage is free to drop the data of its own output
    tensor afterwards.

    Schedules with R call ``recompute_forward``. Vocabulary parallelism calls the last four methods. Other
    stages may do without them by being a subclass. With a shared vocabulary F of stage 0 is given what ``EMBED``
    brought, I and B of the last stage what ``SUM`` brought, and what F of the last stage and I and B of stage 0 return
    is not used: the stages keep it, by microbatch, for the collectives.
    """

    def forward(
        self, stage: int, microbatch: int, activation: Tensor | None, *, split: bool, again: bool
    ) -> Tensor | None:
        """F. ``activation`` is None on stage 0; returns the output, which the last stage may leave out.

        ``split`` says that the backward of this stage and microbatch will come as I and W rather than as B
        (false as well where none will come), ``again`` that an R will come before it: then it is enough to keep what
        :meth:`recompute_forward` needs.
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

    def recompute_forward(self, stage: int, microbatch: int) -> None:
        """R: makes what I or B needs and F, told of this, has not kept; with the same results to the bit."""
        raise ProgramError("these stages do no forward again")

    def reduce_gradients(self, stage: int) -> None:
        """The stage's gradients are complete: let their data-parallel reduction start, and overlap what follows."""
        ...

    def offload(self, stage: int, microbatch: int) -> None:
        """O: the copy to the host ends before what the device does from now on, and what was copied is let go of.

        That copy begins as F ends, which learns from :meth:`.Program.offloads` that there will be this.
        """
        raise ProgramError("these stages offload nothing")

    def load(self, stage: int, microbatch: int) -> None:
        """L: takes the memory again and begins the copy back, for whose end I or B, whichever comes, waits first."""
        raise ProgramError("these stages offload nothing")

    def output_part(self, stage: int, microbatch: int, hidden: Tensor) -> None:
        """S: this rank's part of the output layer, from the last stage's output that ``OUTPUT`` brought."""
        raise ProgramError("these stages share no vocabulary")

    def output_weight(self, stage: int, microbatch: int, weights: Tensor) -> None:
        """T: adds to the gradient of that part, given what ``WEIGH`` brought: the gradient of each token's loss."""
        raise ProgramError("these stages share no vocabulary")

    def add_embedding(self, microbatch: int, gradient: Tensor) -> None:
        """ADD: adds to the gradient of this rank's part of the embedding, given what ``EMBED_BACK`` brought."""
        raise ProgramError("these stages share no vocabulary")

    def meet(self, op: Op, microbatch: int) -> Callable[[], Tensor | None]:
        """This rank's part in the collective ``op``: a chain of calls that wait for other ranks, and what is between.

        Called in the thread that runs the program when the collective is posted, and may read data. What it returns is
        called once, without autograd and possibly in another thread (:mod:`.collectives`); it gives what the collective
        brings to this rank, None where that is nothing. It must not touch what a pass may be changing.
        """
        raise ProgramError("these stages share no vocabulary")
