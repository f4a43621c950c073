"""Compares a job's own measurements with independent events round each pass; and no mark makes it wait."""

from __future__ import annotations

import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.emulated_ranks import RankError
from megatron.schedules.integration.cpu import standin
from megatron.schedules.job.measuring import COSTS
from megatron.schedules.measure.cost_file import read_profile
from megatron.schedules.measure.job_profile import JobProfile
from megatron.schedules.planner.registry import Request, plan
from megatron.schedules.runtime.recorder import Recorder
from megatron.schedules.schedule.kinds import KINDS, Kind, Resource
from megatron.schedules.schedule.text_forms import to_csv
from tools.gpu_tests.offloaded import offloaded
from tools.gpu_tests.pieces import FAULT, Row, Setting
from tools.gpu_tests.watchers import Spans

_RANKS, _MICROBATCHES = 2, 6
_COUNTED, _LAST = 2, 5
# A median may be off the other by so much of it, or so many milliseconds: the marks stand a little outside.
_OFF, _OFF_MS = 0.03, 0.1


class WithStock(Spans):
    """Records its own events round each pass; a mark of the recorder that waits for the device raises."""

    def __init__(self) -> None:
        super().__init__()
        if not standin.needed():
            for name in ("began", "arrived", "ended", "copying"):
                setattr(Recorder, name, _strict(getattr(Recorder, name)))


def _strict(method: Callable[..., Any]) -> Callable[..., Any]:
    def strict(*args: Any) -> Any:
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            return method(*args)
        finally:
            torch.cuda.set_sync_debug_mode(before)

    return strict


def measures_itself(setting: Setting) -> Iterator[Row]:
    """Runs ranks that share a GPU, one schedule after another; the last with copies to the host."""
    from tools.gpu_tests import jobs
    from tools.gpu_tests.one_gpu import fault_of

    flags = [*jobs.size_flags(setting, 2 * _RANKS, usual=False), *jobs.kernel_flags(setting), "--distributed-backend"]
    flags += ["gloo", "--train-iters", str(_LAST), "--global-batch-size", str(_MICROBATCHES)]
    flags += ["--pipeline-model-parallel-size", str(_RANKS)]
    made = {name: plan(Request(name, _RANKS, _MICROBATCHES)) for name in ("1f1b", "zb-1p", "v-half")}
    made = {**made, "v-half with copies": offloaded(made["v-half"])}
    for name, schedule in list(made.items())[-2 if setting.on_cpu else 0 :]:
        with tempfile.TemporaryDirectory(prefix="profile-") as folder:
            csv, costs = Path(folder, "schedule.csv"), Path(folder, COSTS)
            csv.write_text(to_csv(schedule))
            files = ("--pipeline-schedule", str(csv), "--pipeline-measure", f"{folder}:{_COUNTED}-{_LAST}")
            try:
                ran = jobs.train(_RANKS, jobs.Job((*flags, *files), WithStock), shared=True)
                profile = read_profile(costs)
            except (RankError, ValueError) as error:
                yield {"schedule": name, FAULT: fault_of(error)}
            else:
                yield {"schedule": name, **against(profile, ran.found, strict=not setting.on_cpu)}


def against(profile: JobProfile, ranks: Any, *, strict: bool) -> Row:
    """Compares the profile's medians with those of independent events, and checks that it is complete.

    Where that is not to be ``strict``, as on a CPU that others keep busy, they may be as far apart as they like.
    """
    took: dict[tuple[int, Kind], list[float]] = defaultdict(list)
    first, last = profile.iterations
    # Copies, and by the other hand's clock a backward that waits for one to come back, are of no such length.
    others = [kind for kind, row in KINDS.items() if row.resource is not Resource.COMPUTE]
    others += [] if profile.copy_gbps is None else [Kind.I, Kind.B]
    for timed in ranks:
        for spans in timed.iterations[first - 1 : last]:
            for action, began, ended in spans:
                if isinstance(action.op, Kind) and action.op not in others:
                    took[action.stage, action.op].append(1e3 * (ended - began))
    worst, fault = 0.0, "" if took else "no pass was seen by another hand"
    for (stage, kind), each in took.items():
        own, other = profile.stages[stage].median(kind), statistics.median(each)
        worst = max(worst, own / other - 1, 1 - own / other, key=abs)
        if strict and abs(own - other) > max(_OFF * other, _OFF_MS):
            fault = fault or f"{kind} of stage {stage} took {other:.3f} ms, and {own:.3f} by the profile"
    if not all(stage.held > 0 for stage in profile.stages):
        fault = fault or "no bytes were counted on some stage"
    if not profile.latencies:
        fault = fault or "no link latency was measured"
    rates = profile.copy_gbps
    return {
        "stages": len(profile.stages),
        "worst off by, %": 100 * worst,
        "message, ms": profile.comm,
        **({} if rates is None else {"copies out, GB/s": rates.to_host, "back, GB/s": rates.from_host}),
        FAULT: fault,
    }
