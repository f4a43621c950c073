"""A pass: one computation of one stage on one microbatch, and how it is written."""

from __future__ import annotations

import re
from enum import Enum
from typing import NamedTuple

from megatron.schedules.planning.errors import PlanError


class Kind(Enum):
    """What a pass computes.

    ``I`` and ``W`` are the two halves of the whole backward ``B``: the gradient of the stage's input, which the
    previous stage waits for, and the gradients of its weights, which nobody waits for until the optimizer's step.
    """

    F = "F"
    I = "I"  # noqa: E741 - the field's letter for the input gradient
    W = "W"
    B = "B"

    def __str__(self) -> str:
        return self.value

    def __lt__(self, other: Kind) -> bool:
        return self.value < other.value


class Pass(NamedTuple):
    """One computation, written ``{stage}{kind}{microbatch}`` as torch.distributed.pipelining does: ``2F0``, ``5I3``."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @staticmethod
    def parse(text: str) -> Pass:
        """Read ``"5I3"``; raises :class:`PlanError` for anything else."""
        match = _FORM.fullmatch(text.strip())
        if match is None:
            raise PlanError(
                f"{text.strip()!r} is not a pass: write STAGE, one of F I W B, MICROBATCH, as in 2F0 or 5I3"
            )
        return Pass(int(match[1]), Kind(match[2]), int(match[3]))


_FORM = re.compile(r"(\d{1,9})([FIWB])(\d{1,9})", re.ASCII)
