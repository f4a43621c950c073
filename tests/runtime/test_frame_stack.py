"""Room on the stack of Python's frames: at no depth does a call of the engine's map memory."""

from __future__ import annotations

import resource

import pytest
from torch import Tensor

from megatron.schedules.runtime.engine import run
from megatron.schedules.runtime.frame_stack import with_frame_room
from tests.runtime.plain_stages import PlainStages
from tests.runtime.test_engine import NoTransport, one_rank

pytestmark = pytest.mark.pure

CALLS = 64
DEPTHS = range(200)


def calls_itself(deep: int) -> None:
    if deep:
        calls_itself(deep - 1)


def page_faults(deep: int) -> int:
    """Returns the page faults of a loop of calls, ``deep`` frames further down."""
    if deep:
        return page_faults(deep - 1)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for _ in range(CALLS):
        calls_itself(5)
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def most_page_faults() -> int:
    return max(map(page_faults, DEPTHS))


def test_python_maps_memory_in_each_call_of_some_loop() -> None:
    """Where this fails, Python does so no longer, and ``with_frame_room`` can go."""
    assert most_page_faults() >= CALLS


def test_with_room_it_does_in_none() -> None:
    with_room = with_frame_room(lambda: most_page_faults())  # not the function itself, which it would change
    assert with_room() < CALLS


class CountingStages(PlainStages):
    """Stages that count page faults as deep as layers may ever call."""

    def forward(
        self, stage: int, microbatch: int, activation: Tensor | None, *, split: bool, recompute: bool
    ) -> Tensor | None:
        self.page_faults = most_page_faults()
        return super().forward(stage, microbatch, activation, split=split, recompute=recompute)


def test_the_engine_gives_its_passes_room() -> None:
    stages = CountingStages([0], 0)
    run(one_rank("0F0 0B0"), stages, NoTransport())
    assert stages.page_faults < CALLS
