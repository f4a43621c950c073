"""Dry runs in this process, without Megatron: what one says, and what its plan holds and takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from typing import Any, NamedTuple

import pytest

from megatron.schedules.integration.dry_run import dry_run
from megatron.schedules.integration.flags import checks
from megatron.schedules.integration.flags.arguments import completed, spec_of
from megatron.schedules.integration.flags.declared import stock_parser
from megatron.schedules.integration.machine import machine_of
from megatron.schedules.job import least_memory
from megatron.schedules.job.checks import check_model, validate
from megatron.schedules.job.flags import SEARCH_VARIABLE
from megatron.schedules.job.plan_job import JobPlan, plan_job
from megatron.schedules.planner import memory_saving, partition_search, service
from megatron.schedules.utils.cores import THREADS_VARIABLE

# Searches of this many seconds, and with these constants, find poor plans, which promises hold for all the same.
_SECONDS = 0.02
_CONSTANTS: dict[Any, dict[str, float]] = {
    partition_search: {
        "_EFFORT": 20_000,
        "_NAMED_EFFORT": 10_000,
        "_FEWEST_PLANS": 4,
        "_ROUNDS": 6,
        "_FINAL_ROUNDS": 12,
        "_FINALISTS": 2,
        "_FEWEST_ROUNDS": 4,
        "_PASSES": 10_000,
        "_FINAL_PASSES": 20_000,
        "_MOST_CHECKED": 4,
        "_STEPS": 1,
        "_TRIES": 10,
    },
    memory_saving: {"_CLIMBS": 16, "_LONGER": 2},
    least_memory: {"_SECONDS": _SECONDS, "_MOST_CHUNKS": 3},
    service: {"_LEAST_SECONDS": _SECONDS},
}


@contextmanager
def short_searches() -> Iterator[None]:
    """Has all searches take hundredths of a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SEARCH_VARIABLE, str(_SECONDS))
        patch.setenv(THREADS_VARIABLE, "1")
        for module, constants in _CONSTANTS.items():
            for name, value in constants.items():
                patch.setattr(module, name, value)
        yield


class Ending(NamedTuple):
    """How a dry run ends.

    Args:
        status: its exit status.
        said: all that it printed.
        found: the planned job; None if it was refused.
    """

    status: int
    said: str
    found: JobPlan | None


def ended(line: Sequence[str]) -> Ending:
    """Runs the dry run of a command line."""
    said, job = StringIO(), None
    with redirect_stdout(said), redirect_stderr(said):
        try:
            job = job_of(_parsed(line))
            assert job.spec.settings.dry_run is not None
            dry_run(job)
        except SystemExit as end:
            return Ending(int(end.code or 0), said.getvalue(), job)
    raise AssertionError("a dry run ends the process")


def job_of(args: Any) -> JobPlan:
    """Runs all checks of Megatron's arguments, which have a schedule, and plans the job in this process."""
    spec = checks.checked(args)
    assert spec is not None
    return checks.planned(spec)


def planned(line: Sequence[str]) -> JobPlan:
    """Plans the job of a command line.

    Raises:
        PlanError: the job is refused.
    """
    args = _parsed(line)
    spec = spec_of(args)
    validate(spec)
    spec = completed(spec, args)
    check_model(spec)
    return plan_job(spec, machine_of(spec))


def _parsed(line: Sequence[str]) -> Any:
    args, _ = stock_parser().parse_known_args(line)
    args.world_size = 1
    return args
