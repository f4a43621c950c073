"""Transport of messages of any shape: schedules whose microbatches differ in size, and ends without hanging."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.schedules.planner.registry import Request, plan
from megatron.schedules.programs.lowering import lower
from megatron.schedules.programs.program import Channel
from megatron.schedules.runtime.engine import run
from megatron.schedules.runtime.transport import Channels, MessageSpec, Transport, make_channels
from megatron.schedules.schedule.schedule import Schedule
from tests.programs.random_schedules import random_schedule
from tests.ranks import run_ranks
from tests.runtime.plain_stages import PlainStages, without_pipeline

pytestmark = pytest.mark.job

CPU = torch.device("cpu")
SPEC = MessageSpec((0, 0), torch.float32, CPU)


def gloo_channels() -> tuple[Channels, Channels]:
    """Between all pairs of ranks: for tensors, for shapes."""
    world = list(range(dist.get_world_size()))
    pairs = [Channel(a, b) for a in world for b in world if a != b]
    return make_channels([world], pairs), make_channels([world], pairs, backend="gloo")


def variable_transport() -> Transport:
    channels, shapes = gloo_channels()
    return Transport(channels, SPEC, shapes=shapes)


def _run_body(schedules: list[Schedule]) -> list[tuple[dict, dict]]:
    rank, channels = dist.get_rank(), gloo_channels()
    found = []
    for schedule in schedules:
        placement = schedule.placement
        stages = PlainStages(placement.stages_of(rank), placement.last_stage, varied=True)
        run(lower(schedule)[rank], stages, Transport(channels[0], SPEC, shapes=channels[1]))
        gradients = {s: [None if g is None else g.numpy() for g in gs] for s, gs in stages.gradients().items()}
        found.append((gradients, {m: loss.item() for m, loss in stages.losses.items()}))
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_microbatches_that_differ_in_size_give_the_gradients_of_a_plain_run(ranks: int):
    names = ("1f1b", "interleaved-1f1b", "zb-1p", "v-min", "v-half", "v-zb")
    schedules = [random_schedule(seed, ranks) for seed in range(100 * ranks, 100 * ranks + 12)]
    schedules += [plan(Request(name, ranks, n)) for name in names for n in (1, 5)]
    found = run_ranks(ranks, _run_body, schedules)
    for index, schedule in enumerate(schedules):
        expected, losses = without_pipeline(schedule, varied=True)
        seen: dict[int, float] = {}
        gradients: dict[int, Any] = {}
        for rank_found in found:
            gradients |= rank_found[index][0]
            seen |= rank_found[index][1]
        assert seen == {m: loss.item() for m, loss in losses.items()}
        assert gradients.keys() == expected.keys()
        for stage, grads in gradients.items():
            for gradient, reference in zip(grads, expected[stage], strict=True):
                assert torch.equal(torch.from_numpy(gradient), reference), f"{schedule.name} stage {stage}"


def _order_body() -> list[tuple[tuple[int, ...], float]]:
    """Each side posts both sends before it receives, and waits in a random order."""
    rank, got = dist.get_rank(), {}
    transport, rng = variable_transport(), random.Random(dist.get_rank())
    for pair in ((k, k + 1) for k in range(0, 8, 2)):
        for k in pair:
            transport.send(1 - rank, torch.full((k + 1, rank + 2), float(k)).t().contiguous().t())
        pending = [(k, transport.receive(1 - rank)) for k in pair]
        rng.shuffle(pending)
        for k, message in pending:
            arrived = message.wait()
            assert (arrived == arrived[0, 0]).all()
            got[k] = tuple(arrived.shape), arrived[0, 0].item()
    transport.finish()
    return [got[k] for k in range(8)]


def test_shapes_and_contents_belong_together_whatever_is_waited_for_first():
    expected = [[((k + 1, width), float(k)) for k in range(8)] for width in (3, 2)]
    assert run_ranks(2, _order_body) == expected


def _refused_body() -> list[str]:
    transport, refused = variable_transport(), []
    for tensor in (torch.zeros(5), torch.zeros(5, 1, dtype=torch.float64)):
        with pytest.raises(ValueError) as caught:
            transport.send(1 - dist.get_rank(), tensor)
        refused.append(str(caught.value))
    return refused


def test_another_dtype_or_number_of_dimensions_is_refused():
    agreed = "a message of torch.float32 in 2 dimensions was agreed, not "
    assert run_ranks(2, _refused_body) == [[agreed + "torch.float32 (5,)", agreed + "torch.float64 (5, 1)"]] * 2
