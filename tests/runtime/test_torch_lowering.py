"""torch's own passes over our CSV: activation memory, messages, and the limit to sends that are not finished."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as of_torch
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from megatron.schedules.planner.registry import Request, every_named
from megatron.schedules.programs.program import SENDS_IN_FLIGHT
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.simulator import peaks
from megatron.schedules.schedule.text_forms import to_csv

pytestmark = pytest.mark.skipif(
    not hasattr(of_torch, "analyze_pipeline_activation_liveness"),
    reason="this torch neither analyses activations nor limits sends; 2.15 does",
)

SIZES = [(2, 4), (3, 5), (4, 8), (5, 3), (8, 16)]


def _every_schedule(ranks: int, microbatches: int) -> Iterator[Schedule]:
    for chunks in (2, 3):
        for timeline in every_named(Request("1f1b", ranks, microbatches, chunks=chunks), {chunks}):
            yield timeline.schedule
    for timeline in every_named(Request("1f1b", ranks, microbatches), {1}):
        yield timeline.schedule


def _loaded(schedule: Schedule, folder: Path, **options: Any) -> _PipelineScheduleRuntime:
    """Returns torch's runtime with our CSV, without processes: loading and lowering read no more of a stage."""
    placement = schedule.placement
    stages = [
        SimpleNamespace(num_stages=placement.stages, group_size=placement.ranks, group_rank=0, submod=None)
        for _ in placement.stages_of(0)
    ]
    runtime = _PipelineScheduleRuntime(stages, schedule.microbatches, loss_fn=sum, **options)
    path = folder / "schedule.csv"
    path.write_text(to_csv(schedule))
    runtime._load_csv(str(path))
    return runtime


def _most_sends(actions: list, per_peer: Any) -> int:
    """Returns the most sends to one peer that a rank has posted and not waited for."""
    pending: dict[Any, int] = defaultdict(int)
    most = 0
    for action in actions:
        kind = action.computation_type.value
        if "SEND_" in kind:
            peer = per_peer(action.stage_index + (1 if kind.endswith("F") else -1))
            pending[peer] += -1 if kind.startswith("WAIT") else 1
            most = max(most, pending[peer])
    return most


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_torch_counts_the_activations_that_our_simulator_counts(ranks: int, microbatches: int, tmp_path: Path):
    for schedule in _every_schedule(ranks, microbatches):
        runtime, placement = _loaded(schedule, tmp_path), schedule.placement
        request = Request(schedule.name, ranks, microbatches, chunks=placement.chunks)
        ours = peaks(schedule, request.costs_on(placement))
        slots = [
            of_torch.analyze_pipeline_activation_liveness(
                runtime, pp_rank=rank, stage_indices=placement.stages_of(rank), granularity="stage_microbatch"
            ).num_slots
            for rank in range(ranks)
        ]
        # A slot holds the activations of one of a rank's chunks. Torch's last until W, as ours by default do.
        assert [peak * placement.chunks for peak in ours] == pytest.approx(slots), schedule.name


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_torch_ends_with_as_few_sends_in_flight_as_our_engine(ranks: int, microbatches: int, tmp_path: Path):
    more_without = 0
    for schedule in _every_schedule(ranks, microbatches):
        rank_of = schedule.placement.rank_of
        # Torch counts the sends of a rank to all its peers together; a rank has two at most.
        limited = _loaded(schedule, tmp_path, max_outstanding_sends=SENDS_IN_FLIGHT)
        for actions in limited.pipeline_order_with_comms.values():
            assert _most_sends(actions, rank_of.__getitem__) <= SENDS_IN_FLIGHT
        # Without the actions of FSDP, which torch's simulation does not know. It raises an error if ranks wait for each
        # other.
        simulated = {
            rank: [action for action in actions if action.microbatch_index is not None]
            for rank, actions in limited.pipeline_order_with_comms.items()
        }
        of_torch._simulate_comms_compute(simulated, rank_of.__getitem__, schedule.placement.stages)
        free = _loaded(schedule, tmp_path).pipeline_order_with_comms
        more_without += any(_most_sends(actions, rank_of.__getitem__) > SENDS_IN_FLIGHT for actions in free.values())
    assert more_without, "docs/flags.md says that sends add up without the limit"
