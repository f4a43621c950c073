"""Buckets start at one point of the program on all replicas, so nothing hangs even where all waits for the device."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from megatron.schedules.planner.registry import Request, plan
from megatron.schedules.programs.lowering import lower
from megatron.schedules.programs.program import Program, channels_of
from megatron.schedules.runtime.engine import run
from megatron.schedules.runtime.transport import Transport
from megatron.schedules.schedule.kinds import Kind
from tests.planner.made_schedules import NAMED
from tests.runtime.strict_wires import Device, Rendezvous, Waiting, strict_channels
from tests.runtime.test_device_sync import SPEC, MarkedStages
from tests.runtime.thread_ranks import errors_in_threads

BUCKETS, REPLICAS, PATIENCE_S = 3, 2, 20.0


class Bucketed(MarkedStages):
    """Stages with several buckets each, whose reductions meet those of the other replicas."""

    def __init__(self, program: Program, device: Device, collectives: dict[tuple[int, int], Rendezvous]) -> None:
        from megatron.schedules.integration.gradient_reduction import GradientReduction

        super().__init__(program.placement.last_stage, varied=False)
        self._program = program

        def bucket(stage: int, number: int) -> Any:
            post = partial(device.post, collectives[stage, number])
            return SimpleGroup(params={number}, start_grad_sync=lambda *, force_all_reduce: post())

        self.reduction = GradientReduction(
            [
                SimpleNamespace(
                    bucket_groups=[bucket(stage, number) for number in range(BUCKETS)],
                    expert_parallel_bucket_groups=[],
                    force_all_reduce=False,
                )
                for stage in program.placement.stages_of(program.rank)
            ],
            overlapped=True,
        )

    def forward(
        self, stage: int, microbatch: int, activation: Tensor | None, *, split: bool, recompute: bool
    ) -> Tensor | None:
        self.reduction.begin_pass()
        return super().forward(stage, microbatch, activation, split=split, recompute=recompute)

    def backward(self, stage: int, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        self._begin(Kind.B, stage, microbatch)
        return super().backward(stage, microbatch, gradient)

    def backward_input(self, stage: int, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        self.reduction.begin_pass()
        return super().backward(stage, microbatch, gradient)

    def backward_weight(self, stage: int, microbatch: int) -> None:
        self._begin(Kind.W, stage, microbatch)

    def reduce_gradients(self, stage: int) -> None:
        self.reduction.complete(self._program.placement.chunk_of(stage))

    def _begin(self, kind: Kind, stage: int, microbatch: int) -> None:
        self.reduction.begin_pass()
        ending = self._program.endings.get((kind, stage, microbatch))
        if ending is not None:
            self.reduction.completing(self._program.placement.chunk_of(stage), None, ending.passes_left)


class WaitingForBuckets(Waiting):
    """The same, before each of whose calls the device is waited for."""

    def reduce_gradients(self, stage: int) -> None:
        self._device.synchronize()
        self._stages.reduce_gradients(stage)


class SimpleGroup(SimpleNamespace):
    """A bucket, which can be told from its equals."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


@pytest.mark.parametrize("connections", ["1", "8"])
@pytest.mark.parametrize("name", NAMED)
def test_replicas_do_not_wait_for_each_other_for_ever(
    monkeypatch: pytest.MonkeyPatch, name: str, connections: str
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)
    for ranks, n in ((2, 4), (4, 8)):
        programs = lower(plan(Request(name, ranks, n)))
        placement = programs[0].placement
        collectives = {
            (stage, number): Rendezvous(REPLICAS, PATIENCE_S)
            for stage in range(placement.stages)
            for number in range(BUCKETS)
        }
        jobs = []
        for _ in range(REPLICAS):
            devices = [Device(waits=True) for _ in programs]
            channels = strict_channels(channels_of(placement), devices, PATIENCE_S)
            for program, device, own in zip(programs, devices, channels, strict=True):
                stages = Bucketed(program, device, collectives)
                jobs.append((program, stages, WaitingForBuckets(stages, device), Transport(own, SPEC)))

        def carry_out(number: int, jobs: list[Any] = jobs) -> None:
            program, stages, waiting, transport = jobs[number]
            run(program, waiting, transport)
            stages.reduction.finish()

        assert errors_in_threads(list(range(len(jobs))), carry_out) == []
        assert all(collective.is_completed() for collective in collectives.values()), (
            "every bucket of every replica is reduced"
        )
