"""Transport over gloo between real processes: order, overlap, lifetime of tensors, and ends without hanging."""

from __future__ import annotations

import os
import signal
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.schedules.planner.registry import Request, plan
from megatron.schedules.programs.checker import check
from megatron.schedules.programs.lowering import lower
from megatron.schedules.programs.program import Channel, channels_of
from megatron.schedules.runtime.engine import run
from megatron.schedules.runtime.transport import ChannelEnd, Channels, MessageSpec, Transport, make_channels, rounds
from megatron.schedules.schedule.placement import Placement, interleaved, sequential, v_shape
from megatron.schedules.schedule.schedule import Schedule
from tests.programs.random_schedules import forwards_of, random_schedule
from tests.ranks import outcomes_of, run_ranks
from tests.runtime.plain_stages import SHAPE, PlainStages, without_pipeline
from tests.waiting import HANGS_S

pytestmark = pytest.mark.job

CPU = torch.device("cpu")
SPEC = MessageSpec(SHAPE, torch.float32, CPU)
ONE = MessageSpec((4,), torch.float32, CPU)
BOTH_WAYS = [Channel(0, 1), Channel(1, 0)]


def _world() -> list[int]:
    return list(range(dist.get_world_size()))


def _run_all(schedules: list[Schedule], rank: int, channels: Channels) -> list[tuple[dict, dict]]:
    """Carry out each schedule as pipeline rank ``rank``; its gradients (as lists) and losses."""
    found = []
    for schedule in schedules:
        placement = schedule.placement
        program = lower(schedule)[rank]
        stages = PlainStages(placement.stages_of(rank), placement.last_stage)
        run(program, stages, Transport(channels, SPEC))
        gradients = {s: [g.numpy() for g in grads] for s, grads in stages.gradients().items()}
        found.append((gradients, {m: loss.item() for m, loss in stages.losses.items()}))
    return found


def _every_pair_body(schedules: list[Schedule]) -> list[tuple[dict, dict]]:
    world = _world()
    pairs = [Channel(a, b) for a in world for b in world if a != b]
    return _run_all(schedules, dist.get_rank(), make_channels([world], pairs))


def _check_gradients(schedules: list[Schedule], found: list[list[tuple[dict, dict]]]) -> None:
    for index, schedule in enumerate(schedules):
        expected, losses = without_pipeline(schedule)
        seen = {}
        for rank_found in found:
            gradients, rank_losses = rank_found[index]
            seen |= rank_losses
            for stage, grads in gradients.items():
                for gradient, reference in zip(grads, expected[stage], strict=True):
                    assert torch.equal(torch.from_numpy(gradient), reference), f"{schedule.name} stage {stage}"
        assert seen == {m: loss.item() for m, loss in losses.items()}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_random_schedules_give_the_gradients_of_a_plain_run(ranks: int):
    """The same channels serve every schedule and every number of microbatches."""
    schedules = [random_schedule(seed, ranks) for seed in range(100 * ranks, 100 * ranks + 12)]
    for schedule in schedules:
        check(lower(schedule))
    _check_gradients(schedules, run_ranks(ranks, _every_pair_body, schedules))


def test_two_ranks_whose_neighbours_are_the_same():
    names = ("1f1b", "interleaved-1f1b", "zb-1p", "1f1b-v", "v-min", "v-half", "v-zb")
    schedules = [plan(Request(name, 2, n)) for name in names for n in (1, 4, 5)]
    _check_gradients(schedules, run_ranks(2, _every_pair_body, schedules))


def _two_pipelines_body(schedules: list[Schedule]) -> list[tuple[dict, dict]]:
    pipelines = [[0, 2], [3, 1]]
    placement = schedules[0].placement
    channels = make_channels(pipelines, channels_of(placement), timeout=timedelta(seconds=HANGS_S))
    (mine,) = [p for p in pipelines if dist.get_rank() in p]
    return _run_all(schedules, mine.index(dist.get_rank()), channels)


def test_two_pipelines_side_by_side_in_any_order_of_ranks():
    schedules = [plan(Request("v-half", 2, n)) for n in (3, 6)]
    found = run_ranks(4, _two_pipelines_body, schedules)
    _check_gradients(schedules, [found[0], found[2]])
    _check_gradients(schedules, [found[3], found[1]])


def _refuse_body() -> str:
    try:
        make_channels([[0], [0]] if dist.get_rank() == 0 else [[0]], [])
    except ValueError as error:
        return str(error)
    return "accepted"


def test_a_process_must_be_in_one_pipeline():
    assert run_ranks(2, _refuse_body) == [
        "global rank 0 is in 2 of the pipelines [[0], [0]]; it must be in one",
        "global rank 1 is in 0 of the pipelines [[0]]; it must be in one",
    ]


@pytest.mark.parametrize("d", [2, 3, 8, 64])
@pytest.mark.parametrize(("place", "most"), [(sequential, 4), (v_shape, 4), (partial(interleaved, chunks=2), 6)])
def test_no_rank_talks_to_two_others_in_a_round(place: Callable[[int], Placement], most: int, d: int):
    """So a pipeline of 64 ranks is connected as fast as one of four."""
    channels = channels_of(place(d))
    found = rounds(reversed(channels))
    assert sorted(channel for collective in found for channel in collective) == sorted(channels)
    for collective in found:
        assert len({end for channel in collective for end in channel}) == 2 * len(collective)
    assert len(found) <= most


def _asked_for_body() -> list[tuple[Any, ...]]:
    asked: list[tuple[Any, ...]] = []
    made = count()

    def new_group(ranks: list[int], **kwargs: Any) -> dist.ProcessGroup:
        asked.append((ranks, kwargs.pop("timeout"), kwargs.pop("pg_options"), kwargs.pop("group_desc")))
        return dist.new_group(ranks, **kwargs)

    options = {"options": lambda: f"options {next(made)}", "new_group": new_group}
    make_channels([[0, 1], [3, 2]], BOTH_WAYS, timeout=timedelta(seconds=9), **options)
    return asked


def test_every_process_makes_all_groups_in_one_order():
    """Torch counts them for their names; and each gets options of its own, for torch writes into them."""
    found = run_ranks(4, _asked_for_body)
    assert found == [found[0]] * 4
    groups = [([0, 1], "0->1"), ([3, 2], "0->1"), ([1, 0], "1->0"), ([2, 3], "1->0")]
    limit = timedelta(seconds=9)
    assert found[0] == [(ranks, limit, f"options {k}", f"pipeline {way}") for k, (ranks, way) in enumerate(groups)]


def _order_body() -> list[float]:
    """Each side posts both sends before either receives: nothing may wait for the other direction."""
    rank = dist.get_rank()
    transport = Transport(make_channels([[0, 1]], BOTH_WAYS), ONE)
    got: list[float] = []
    for k in range(0, 8, 2):
        for number in (k, k + 1):
            transport.send(1 - rank, torch.full((4,), float(10 * rank + number)))
        first, second = transport.receive(1 - rank), transport.receive(1 - rank)
        found = [p.wait()[0].item() for p in (second, first)]  # in another order than posted
        got += reversed(found)
    transport.finish()
    return got


def test_messages_arrive_in_order_whatever_is_waited_for_first():
    assert run_ranks(2, _order_body) == [[10.0 + k for k in range(8)], [0.0 + k for k in range(8)]]


def _dtypes_body() -> list[bool]:
    rank = dist.get_rank()
    channels = make_channels([[0, 1]], BOTH_WAYS)
    same = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        transport = Transport(channels, MessageSpec((5, 3), dtype, CPU))
        tensor = torch.arange(15.0).to(dtype).view(3, 5).t()  # not contiguous
        pending = transport.receive(1 - rank)
        transport.send(1 - rank, tensor)
        same.append(torch.equal(pending.wait(), tensor))
        transport.finish()
    return same


def test_any_dtype_and_layout():
    assert run_ranks(2, _dtypes_body) == [[True] * 4] * 2


def _mismatch_body() -> str:
    transport = Transport(make_channels([[0, 1]], BOTH_WAYS), ONE)
    try:
        transport.send(1 - dist.get_rank(), torch.zeros(5))
    except ValueError as error:
        return str(error)
    return "accepted"


def test_a_message_unlike_the_agreed_one_is_refused():
    assert run_ranks(2, _mismatch_body) == ["a message of torch.float32 (4,) was agreed, not torch.float32 (5,)"] * 2


def _lifetime_body() -> tuple[int, bool]:
    """Rank 0 drops its tensors at once and makes others while rank 1 has posted nothing yet."""
    spec = MessageSpec((1000,), torch.float32, CPU)
    transport = Transport(make_channels([[0, 1]], BOTH_WAYS), spec)
    kept, right = 0, True
    if dist.get_rank() == 0:
        storages = [_sent(transport, 1, torch.full(spec.shape, float(k))) for k in range(2)]
        noise = [torch.full(spec.shape, -1.0) for _ in range(100)]
        kept = sum(storage() is not None for storage in storages)
        dist.barrier()
        del noise
        for k in range(2, 10):
            transport.send(1, torch.full(spec.shape, float(k)))
    else:
        dist.barrier()
        for k in range(10):
            right = right and torch.equal(transport.receive(0).wait(), torch.full(spec.shape, float(k)))
    transport.finish()
    return kept, right


def _sent(transport: Transport, peer: int, tensor: Tensor) -> weakref.ref[torch.UntypedStorage]:
    """Send it, and tell whether its memory is still there."""
    transport.send(peer, tensor)
    return weakref.ref(tensor.untyped_storage())


def test_storage_is_kept_until_sent():
    assert run_ranks(2, _lifetime_body) == [(2, True), (0, True)]


class FakeWork:
    """A send that counts who waits for it."""

    waits = 0

    def wait(self) -> None:
        self.waits += 1


class FakeGroup:
    """Posts what it is given, and keeps what the others may not know it has."""

    def __init__(self) -> None:
        self.works: list[FakeWork] = []
        self.tensors: list[Tensor] = []

    def send(self, tensors: list[Tensor], other: int, tag: int) -> FakeWork:
        self.works.append(FakeWork())
        self.tensors += tensors
        return self.works[-1]

    recv = send


def test_a_peer_holds_two_messages_at_most_and_none_of_anothers():
    groups = FakeGroup(), FakeGroup()
    ends = {peer: ChannelEnd(group, 0, streams=True) for peer, group in enumerate(groups)}
    transport = Transport(Channels(ends, {}, CPU), ONE)
    storages = [[_sent(transport, peer, torch.zeros(4)) for _ in range(sends)] for peer, sends in ((0, 5), (1, 1))]
    assert [[work.waits for work in group.works] for group in groups] == [[1, 1, 1, 0, 0], [0]]
    groups[0].tensors.clear()
    assert [storage() is None for storage in storages[0]] == [True, True, True, False, False]
    transport.finish()
    assert all(work.waits == 1 for group in groups for work in group.works)
    assert all(storage() is None for storage in storages[0])


def test_a_group_with_streams_gets_memory_whose_owner_it_cannot_find():
    """NCCL's would have the allocator wait until the host has seen the message end."""
    group, tensor = FakeGroup(), torch.zeros(2, 2, dtype=torch.bfloat16)
    for streams in (True, False):
        end = ChannelEnd(group, 1, streams)
        end.send(tensor)
        end.receive(tensor)
    assert [given is tensor for given in group.tensors] == [False, False, True, True]
    for given in group.tensors[:2]:
        assert given.data_ptr() == tensor.data_ptr() and (given.shape, given.dtype) == (tensor.shape, tensor.dtype)
        assert given.untyped_storage()._cdata != tensor.untyped_storage()._cdata


def _overlap_body() -> bool:
    """Were a send to wait for its receive, or a transfer for who waits for it, a barrier would never be reached."""
    spec = MessageSpec((1 << 20,), torch.float32, CPU)
    transport = Transport(make_channels([[0, 1]], BOTH_WAYS), spec)
    right = True
    if dist.get_rank() == 0:
        for k in range(2):
            transport.send(1, torch.full(spec.shape, float(k)))
        dist.barrier()  # rank 1 has posted no receive before
        transport.finish()
        dist.barrier()  # rank 1 has waited for none before: it computes
    else:
        dist.barrier()
        pending = [transport.receive(0) for _ in range(2)]
        dist.barrier()
        right = all(torch.equal(p.wait(), torch.full(spec.shape, float(k))) for k, p in enumerate(pending))
        transport.finish()
    return right


def test_transfers_overlap_computing():
    assert all(run_ranks(2, _overlap_body))


class Breaking(PlainStages):
    """Stages that break at one pass."""

    how = "raise"

    def backward(self, stage: int, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        if microbatch == 1:
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "hang":
                _store().wait(["given up"], timedelta(seconds=HANGS_S))
            raise ValueError("broken on purpose")
        return super().backward(stage, microbatch, gradient)


def _breaking_body(schedule: Schedule, broken: int, how: str, seconds: float) -> None:
    rank, placement = dist.get_rank(), schedule.placement
    channels = make_channels([_world()], channels_of(placement), timeout=timedelta(seconds=seconds))
    kind = Breaking if rank == broken else PlainStages
    Breaking.how = how
    stages = kind(placement.stages_of(rank), placement.last_stage)
    try:
        run(lower(schedule)[rank], stages, Transport(channels, SPEC))
    except RuntimeError:
        _store().set("given up", str(rank))
        raise


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


@pytest.mark.parametrize("how", ["raise", "kill"])
@pytest.mark.parametrize("broken", [0, 2])
def test_a_rank_that_breaks_ends_all_of_them(how: str, broken: int):
    schedule = plan(Request("v-half", 4, 6))
    # The group would hang for longer than all ranks together may take.
    outcomes = outcomes_of(4, _breaking_body, schedule, broken, how, 10 * HANGS_S)
    for rank, outcome in enumerate(outcomes):
        if rank != broken:
            assert outcome.exit_code == 1 and outcome.error is not None
            assert f"on pipeline rank {rank} of 4, at " in outcome.error
    if how == "raise":
        error = outcomes[broken].error
        assert error is not None and "ValueError: broken on purpose" in error
        assert f"on pipeline rank {broken} of 4, at " in error
    else:
        assert outcomes[broken].exit_code == -signal.SIGKILL


def test_a_rank_that_hangs_makes_the_others_time_out():
    schedule = plan(Request("v-half", 2, 4))
    waiting, hanging = outcomes_of(2, _breaking_body, schedule, 1, "hang", 8)
    assert waiting.error is not None and "Timed out" in waiting.error
    assert "on pipeline rank 0 of 2, at " in waiting.error
    assert hanging.error is not None and "broken on purpose" in hanging.error, "it hung until the other gave up"


def _forward_only_body(schedules: list[Schedule]) -> list[dict[int, float]]:
    rank = dist.get_rank()
    channels = make_channels([_world()], channels_of(schedules[0].placement))
    found = []
    for schedule in schedules:
        placement = schedule.placement
        stages = PlainStages(placement.stages_of(rank), placement.last_stage)
        run(lower(schedule)[rank], stages, Transport(channels, SPEC))
        found.append({m: loss.item() for m, loss in stages.losses.items()})
    return found


@pytest.mark.parametrize("name", ["v-half", "interleaved-1f1b"])
def test_forwards_alone(name: str):
    schedules = [forwards_of(plan(Request(name, 3, n))) for n in (1, 2, 7)]
    found = run_ranks(3, _forward_only_body, schedules)
    for index, schedule in enumerate(schedules):
        losses = {m: loss for rank_found in found for m, loss in rank_found[index].items()}
        expected = without_pipeline(plan(Request(name, 3, schedule.microbatches)))[1]
        assert losses == {m: loss.item() for m, loss in expected.items()}


def test_placements_here_are_the_ones_meant():
    assert plan(Request("v-half", 2, 2)).placement == v_shape(2)
    assert plan(Request("interleaved-1f1b", 2, 2)).placement == interleaved(2, 2)
    assert plan(Request("zb-1p", 2, 2)).placement == sequential(2)
