"""benchmarks/emulated_messages: pieces of weight gradients run in order behind a message, and W does the rest."""

from __future__ import annotations

import pytest
import torch

from benchmarks import emulated_messages, emulated_passes
from benchmarks.emulated_passes import Passes
from megatron.schedules.programs.lowering import lower
from megatron.schedules.schedule.cost_parts import LayerTimes
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.kinds import Kind
from megatron.schedules.schedule.text_forms import from_csv

ROWS = "0F0,0F1,0F2,0I0,0I1,0I2,0W0,0W1,0W2\n1F0,1F1,1F2,1I0,1I1,1I2,1W0,1W1,1W2"


class Clock:
    """A clock that only sleeping moves on."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_pieces_run_behind_a_message_and_w_does_the_rest(monkeypatch: pytest.MonkeyPatch):
    clock = Clock()
    for module in (emulated_messages, emulated_passes):
        monkeypatch.setattr(module, "time", clock)
    schedule = from_csv(ROWS)
    costs = Costs(LayerTimes(2.0, 2.0, 0.5, (0.25, 0.75))).on(schedule.placement)  # twice as long on one chunk
    stages = emulated_messages._HidingStages(Passes(costs, dict.fromkeys(Kind, 0.0)), lower(schedule)[0])
    for m in range(3):
        assert stages.forward(0, m, None, split=True, recompute=False) is not None
    assert stages.run_ahead(clock.now, 1.0) == clock.now  # nothing is due
    for m in range(3):
        stages.backward_input(0, m, torch.zeros(emulated_passes.SHAPE))
    begin = clock.now
    assert stages.run_ahead(begin, 1.22) == clock.now == begin + 1.25  # half a piece or more counts as one: 20 of 1/16
    stages.backward_weight(0, 0)
    assert clock.now == begin + 1.25  # hidden entirely
    stages.backward_weight(0, 1)
    assert clock.now == begin + 2.0
    assert stages.run_ahead(clock.now, 1.0) == clock.now  # the last stays whole
    stages.backward_weight(0, 2)
    assert clock.now == begin + 3.0
