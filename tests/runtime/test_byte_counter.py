"""Bytes are counted pass by pass, and what messages bring counts for none."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megatron.schedules.runtime.activation_meter import ActivationMeter
from megatron.schedules.runtime.engine import run
from megatron.schedules.runtime.recorder import ByteCounter
from megatron.schedules.schedule.kinds import Pass
from tests.runtime.plain_stages import PlainStages
from tests.runtime.test_engine import NoTransport, one_rank

WIDE = 3 * 8 * 4
"""Bytes of a microbatch between any two layers."""


class Metered(PlainStages):
    """One stage of plain layers, whose saved tensors are counted."""

    def __init__(self) -> None:
        super().__init__((0,), 0)
        parameters = (parameter for module in self.modules.values() for parameter in module.parameters())
        self.meter = self.store._meter = ActivationMeter(parameters)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor | None:
        with self.meter.recording():
            return super().forward(*args, **kwargs)

    def reduce_gradients(self, stage: int) -> None: ...


def test_each_pass_takes_or_gives_back_its_bytes():
    """Inputs of two linears and two GELUs, and of the loss; two inputs and two gradients wait for W."""
    stages = Metered()
    counter = ByteCounter(lambda: stages.meter.current)
    run(one_rank("0F0 0I0 0W0 0F1 0B1", n=2), stages, NoTransport(), [counter])
    found = {str(work): change / WIDE for work, change in counter.changes}
    assert found == {"0F0": 5, "0I0": -1, "0W0": -4, "0F1": 5, "0B1": -5}
    assert [work for work, _ in counter.changes][:2] == [Pass.parse("0F0"), Pass.parse("0I0")]
