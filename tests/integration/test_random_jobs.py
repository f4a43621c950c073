"""Dry runs of jobs as people write them: no traceback, no plan over its limit, and ``auto`` is never longer."""

from __future__ import annotations

import re
import shlex
import traceback
from collections.abc import Callable, Iterator, Sequence

import pytest

from megatron.schedules.estimate.device_memory import RESERVED
from megatron.schedules.job.plan_job import JobPlan
from megatron.schedules.job.spec import Settings
from megatron.schedules.utils.errors import PlanError
from tests.integration.dry_runs import Ending, ended, planned, short_searches
from tests.integration.random_jobs import random_job

NAMED = "1f1b eager-1f1b interleaved-1f1b:2 interleaved-1f1b:3 zb-1p zb-2p 1f1b-v v-min v-half v-zb".split()
# Jobs of one test, and number of such tests.
JOBS, TESTS = 12, 25
_ROUNDING = 1 + 1e-9

SIZE = shlex.split("""
    --hidden-size 4096 --num-attention-heads 32 --group-query-attention --num-query-groups 8 --seq-length 8192
    --max-position-embeddings 8192 --vocab-size 32000 --micro-batch-size 1 --train-iters 6 --bf16
""")
# Jobs under auto that were planned wrongly once, with the value of their dry run.
FOUND = {
    "recompute of each stage's first layers": (
        "--num-layers 32 --pipeline-model-parallel-size 4 --global-batch-size 4 "
        "--recompute-granularity full --recompute-method block --recompute-num-layers 2",
        "4",
    ),
    "layers of the last stage by a flag": (
        "--num-layers 47 --pipeline-model-parallel-size 3 --global-batch-size 6 --decoder-last-pipeline-num-layers 15",
        "3x192GiB",
    ),
    "layers that two chunks do not divide": (
        "--num-layers 27 --pipeline-model-parallel-size 3 --global-batch-size 3 --pipeline-layers even",
        "3",
    ),
}


@pytest.fixture(autouse=True, scope="module")
def _short() -> Iterator[None]:
    with short_searches():
        yield


def check(line: Sequence[str], by_name: Callable[[str], Sequence[str]]) -> Ending:
    """Checks what must hold for every dry run of ``adaptive`` and ``auto``, and returns how it ends.

    Args:
        line: the command line.
        by_name: its command line under a schedule by name, without a limit.
    """
    end = ended(line)
    if end.found is None:
        assert end.status == 2, end.said
        assert ": error: --" in end.said.strip().splitlines()[-1], end.said
        return end
    found, settings = end.found, end.found.spec.settings
    room = settings.dry_run and settings.dry_run.device_bytes
    assert end.status == (3 if room and _device(found) > room else 0), end.said
    assert found.layers == found.request.layers_on(found.schedule.placement)
    assert within(found, settings), end.said
    if settings.schedule.name == "auto" and not settings.measures_limit:
        shorter = [name for name in NAMED if _fits_and_is_shorter(by_name(name), found, settings)]
        assert not shorter, end.said
        compared = re.search(r"shortest schedule by name within the limit is ([\w-]+),", end.said)
        # Layers that auto places may be placed for a schedule by name too. Interleaved, it has some number of chunks.
        if compared and compared[1] != "interleaved-1f1b" and not settings.places_layers:
            assert planned(by_name(compared[1])), "it is possible"
    return end


def within(found: JobPlan, settings: Settings) -> bool:
    """Whether a plan is within the limit of ``settings``; without one, within what ``auto`` may use of the device."""
    limit, room = settings.memory_limit, settings.dry_run and settings.dry_run.device_bytes
    if limit is not None and limit.size is not None:
        return max(rank.activations + rank.messages for rank in found.memory) <= limit.size * _ROUNDING
    if limit is None and room:
        return _device(found) <= (1 - RESERVED) * room * _ROUNDING
    most = 1.0 if limit is None else limit.fraction
    return most is None or found.plan.peak_memory <= most * _ROUNDING


def _device(found: JobPlan) -> float:
    """Bytes of the rank that holds most."""
    return found.memory[found.worst].device


def _fits_and_is_shorter(line: Sequence[str], found: JobPlan, settings: Settings) -> bool:
    even = ["--pipeline-layers", "even"] * (settings.layers == "auto" and "--pipeline-layers" in line)
    try:
        named = planned([*line, *even])
    except PlanError:  # it does not go with the job
        return False
    return named.plan.iteration_time * _ROUNDING < found.plan.iteration_time and within(named, settings)


@pytest.mark.parametrize(
    "number",
    [pytest.param(number, marks=pytest.mark.full_matrix if number else ()) for number in range(TESTS)],
)
def test_random_jobs_are_planned_within_their_limit_and_no_fitting_schedule_by_name_is_shorter(number: int):
    wrong, planned_jobs = {}, 0
    for seed in range(number * JOBS, (number + 1) * JOBS):
        job = random_job(seed, most=16 if number else 4)
        try:
            planned_jobs += check(job.line, job.under).found is not None
        except Exception:
            wrong[" ".join(job.line)] = traceback.format_exc()
    assert not wrong, "\n".join(f"{line}\n{why}" for line, why in wrong.items())
    assert planned_jobs >= JOBS / 2, "most are refused, and show little"


@pytest.mark.parametrize(("flags", "dry_run"), FOUND.values(), ids=FOUND)
def test_a_job_that_was_planned_wrongly_once_is_planned_well(flags: str, dry_run: str):
    def under(schedule: str) -> list[str]:
        return [*SIZE, *flags.split(), "--pipeline-dry-run", dry_run, "--pipeline-schedule", schedule]

    end = check(under("auto"), under)
    assert end.found is not None, end.said


def test_the_backend_of_messages_changes_nothing_of_a_plan():
    dropout = "--pipeline-model-parallel-size 4 --num-layers 32 --global-batch-size 8 --transformer-impl local"
    line = [*SIZE, *dropout.split(), *"--pipeline-schedule v-half --pipeline-dry-run 4".split()]
    plain, gloo = (planned([*line, *more]) for more in ([], ["--distributed-backend", "gloo"]))
    assert gloo == plain
    assert gloo.memory == plain.memory
