"""The interface between the engine and a model: the passes of a rank's stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from megatron.schedules.programs.program import Op, ProgramError


class Stages(Protocol):
    """The stages of one rank, ready to compute.

    Every tensor passed in is a leaf without history. It may share its storage with another stage's output on the same
    rank, so it must not be written to; ``requires_grad_()`` on it is allowed. A returned tensor may have history: the
    engine keeps a detached alias, so a stage may free the data of its own output afterwards.

    Methods that raise here are needed only by schedules with R, with O and L, or with vocabulary parallelism. Under
    vocabulary parallelism F of stage 0 gets the result of ``EMBED``, I and B of the last stage that of ``SUM``; what F
    of the last stage and I and B of stage 0 return is not used: the stages keep it, by microbatch, for the collectives.
    """

    def forward(
        self, stage: int, microbatch: int, activation: Tensor | None, *, split: bool, recompute: bool
    ) -> Tensor | None:
        """F. ``activation`` is None on stage 0; returns the output, which the last stage may leave out.

        Args:
            stage, microbatch, activation: what to compute.
            split: whether the backward comes as I and W; False too where none comes.
            recompute: whether an R comes before the backward: then only what :meth:`recompute_forward` needs is kept.
        """
        ...

    def backward(self, stage: int, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        """B, the whole backward: from the output's gradient (last stage: None) to the input's (stage 0: None)."""
        ...

    def backward_input(self, stage: int, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        """I, the first half: takes and returns the same as :meth:`backward`, and leaves the weights for W."""
        ...

    def backward_weight(self, stage: int, microbatch: int) -> None:
        """W, the second half: adds to the weights' gradients and frees what is left of the microbatch."""
        ...

    def reduce_gradients(self, stage: int) -> None:
        """Starts the data-parallel reduction of the stage's complete gradients, behind the next passes."""
        ...

    def recompute_forward(self, stage: int, microbatch: int) -> None:
        """R: makes what I or B needs and F has not kept, equal to the bit."""
        raise ProgramError("these stages recompute no forward")

    def offload(self, stage: int, microbatch: int) -> None:
        """O: makes the device wait for the end of the copy to the host, and frees the device memory.

        The copy begins as F ends; F learns from :meth:`.Program.offloads` that there will be one.
        """
        raise ProgramError("these stages offload nothing")

    def load(self, stage: int, microbatch: int) -> None:
        """L: allocates device memory and begins the copy back. The I or B that follows waits for its end."""
        raise ProgramError("these stages offload nothing")

    def output_part(self, stage: int, microbatch: int, hidden: Tensor) -> None:
        """S: this rank's part of the output layer, from the last stage's output that ``OUTPUT`` brought."""
        raise ProgramError("these stages have no vocabulary parallelism")

    def output_weight(self, stage: int, microbatch: int, weights: Tensor) -> None:
        """T: adds to the gradient of that part, from the gradient of each token's loss that ``WEIGH`` brought."""
        raise ProgramError("these stages have no vocabulary parallelism")

    def add_embedding(self, microbatch: int, gradient: Tensor) -> None:
        """ADD: adds to the gradient of this rank's part of the embedding, from what ``EMBED_BACK`` brought."""
        raise ProgramError("these stages have no vocabulary parallelism")

    def collective(self, op: Op, microbatch: int) -> Callable[[], Tensor | None]:
        """Returns this rank's part in the collective ``op``: a chain of calls that wait for other ranks.

        Called in the thread that runs the program when the collective is posted, and may read data. The chain is called
        once, without autograd and possibly in another thread (:mod:`.collectives`); it returns the collective's result
        for this rank, None where there is none. It must not touch what a pass may be changing.
        """
        raise ProgramError("these stages have no vocabulary parallelism")
