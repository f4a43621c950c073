"""A plan that a job's first rank makes and sends to all others, before process groups exist or after."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from itertools import count

import torch.distributed as dist

from megatron.schedules.integration.flags.checks import made, refusing
from megatron.schedules.integration.machine import machine_of
from megatron.schedules.job.plan_job import JobPlan, check_fits, plan_job
from megatron.schedules.job.plan_text import from_text, to_text
from megatron.schedules.job.spec import JobSpec
from megatron.schedules.planner.request import Request
from megatron.schedules.runtime.planner import Planner
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.text_forms import from_json, to_json

# A rank that comes later than this has failed. A search may take longer, and ranks wait for it as long as need be.
_TO_START, _TO_PLAN = timedelta(minutes=5), timedelta(hours=1)
# Seconds that the first rank, which may hold the store, waits for all others to read.
_TO_READ = 60.0


class SharedPlans:
    """Plans that the first rank makes. All ranks ask for the same ones."""

    def __init__(self) -> None:
        self._store: dist.Store | None = None
        self._jobs = count()

    def job(self, spec: JobSpec) -> JobPlan:
        """Plans a job, or refuses it in one line of the first rank. Collective over all ranks of the job."""
        own: list[JobPlan] = []
        with refusing(spec.settings.schedule.text):
            machine = machine_of(spec)

        def text() -> str:
            with refusing(spec.settings.schedule.text):
                own.append(plan_job(spec, machine, made))
                check_fits(own[0])
            return to_text(own[0])

        sent = self._shared(f"job {next(self._jobs)}", text)
        return own[0] if own else from_text(sent, spec)

    def planner(self, job: JobPlan) -> Planner:
        """Returns the plans and programs of a job, whose plans for other numbers of microbatches are shared too."""
        name, asked = f"{next(self._jobs)}", Counter[int]()

        def schedule(request: Request) -> Schedule:
            if request.schedule != "adaptive":  # made in a moment, and alike everywhere
                return made(request).schedule
            asked[request.microbatches] += 1
            key = f"{name}, {request.microbatches} microbatches, {asked[request.microbatches]}"
            return from_json(self._shared(key, lambda: to_json(made(request).schedule)))

        return Planner(job.request, job.schedule, job.programs, schedule)

    def _shared(self, key: str, make: Callable[[], str]) -> str:
        """Returns the text that ``make`` returns on the first rank. Collective over all ranks of the job.

        If it fails there, that rank says why, and all others end with status 2, in silence.
        """
        rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        if dist.is_initialized():
            rank, world = dist.get_rank(), dist.get_world_size()
        if world == 1 or not (dist.is_initialized() or "MASTER_ADDR" in os.environ):
            return make()  # of a script that asks what would be planned, without a launcher
        if self._store is None:
            self._store = _store(rank)
        if rank:
            self._store.wait([key], _TO_PLAN)
            text: str = self._store.get(key).decode()
            self._store.add(f"{key} read", 1)
            if not text:
                raise SystemExit(2)
            return text
        text = ""
        try:
            text = make()
        finally:  # of a refusal the line is printed by now: a launcher may end all ranks with the next
            self._store.set(key, text)
            _wait(self._store, f"{key} read", world - 1)
        return text


def _store(rank: int) -> dist.Store:
    """Returns a store of the job: that of its process groups, or the one that they will use.

    Torch shares one server between all stores of a process at the same address.
    """
    if dist.is_initialized():
        store = dist.distributed_c10d._get_default_store()
    else:
        by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=rank == 0 and not by_torchrun,
            timeout=_TO_START,
            wait_for_workers=False,
            multi_tenant=True,
        )
    return dist.PrefixStore(f"megatron-schedules/plan/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def _wait(store: dist.Store, counter: str, most: int) -> None:
    end = time.monotonic() + _TO_READ
    while store.add(counter, 0) < most and time.monotonic() < end:
        time.sleep(0.02)
