"""Pass: one operation of one stage on one microbatch, and its text form."""

from __future__ import annotations

import re
from typing import NamedTuple

from megatron.schedules.schedule.kinds import Kind
from megatron.schedules.utils.errors import PlanError


class Pass(NamedTuple):
    """One operation, written ``{stage}{kind}{microbatch}`` as in torch.distributed.pipelining: ``2F0``, ``5I3``."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @staticmethod
    def parse(text: str) -> Pass:
        """Reads a pass such as ``"5I3"``; raises :class:`PlanError` for anything else."""
        match = _FORM.fullmatch(text.strip())
        if match is None:
            raise PlanError(
                f"{text.strip()!r} is not a pass: write STAGE, one of {' '.join(Kind)}, MICROBATCH, as in 2F0 or 5I3"
            )
        return Pass(int(match[1]), Kind(match[2]), int(match[3]))


_FORM = re.compile(rf"(\d{{1,9}})({'|'.join(Kind)})(\d{{1,9}})", re.ASCII)
