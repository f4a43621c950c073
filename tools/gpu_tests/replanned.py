"""A job that logs its bubble and peak, measures free memory, replans and switches."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from benchmarks.emulated_ranks import RankError
from megatron.schedules.integration.log.run_log import Logged, RunLog
from megatron.schedules.integration.rank_device import STANDIN_VARIABLE
from megatron.schedules.job.flags import SEARCH_VARIABLE
from megatron.schedules.planner.background import BackgroundPlan
from megatron.schedules.planner.replanning import Proposal
from megatron.schedules.programs.program import Action, Program
from megatron.schedules.schedule.kinds import WHOLES, Kind
from tools.gpu_tests.pieces import FAULT, Row, Setting

_RANKS, _MICROBATCHES, _ITERATIONS = 2, 8, 9
# What a CPU's ranks have for activations of the tiny model.
_CPU_BYTES = "300000"
_BACKWARDS = {Kind.I, *WHOLES.values()}


class Replanning:
    """Records the programs of training and the log; waits for the process that plans."""

    def __init__(self) -> None:
        self._programs: list[int] = []
        self._logged: list[tuple[float, float | None]] = []
        stock, poll = RunLog.logged, BackgroundPlan.poll

        def logged(log: RunLog, counted: int) -> Logged | None:
            found = stock(log, counted)
            if found is not None:
                self._logged.append((found.measured.bubble, found.peak))
            return found

        def waited(search: BackgroundPlan) -> Proposal:
            while (found := poll(search)) is None:
                time.sleep(0.05)
            return found

        RunLog.logged, BackgroundPlan.poll = logged, waited  # type: ignore[assignment,method-assign]

    def program(self, program: Program) -> AbstractContextManager[Any]:
        if any(action.op in _BACKWARDS for action in program.actions):
            self._programs.append(hash(program.actions))
        return nullcontext()

    def action(self, action: Action) -> AbstractContextManager[Any]:
        return nullcontext()

    @property
    def found(self) -> Any:
        pairs = zip(self._programs, self._programs[1:], strict=False)
        return [at for at, (was, now) in enumerate(pairs, 2) if was != now], self._logged


def replans(setting: Setting) -> Iterator[Row]:
    """Runs ranks that share a GPU, with the first plan and replanned, under a named schedule and ``adaptive``."""
    from tools.gpu_tests import jobs
    from tools.gpu_tests.one_gpu import fault_of

    flags = [*jobs.size_flags(setting, 2 * _RANKS, usual=False), *jobs.kernel_flags(setting), "--distributed-backend"]
    flags += ["gloo", "--train-iters", str(_ITERATIONS), "--global-batch-size", str(_MICROBATCHES)]
    flags += ["--pipeline-model-parallel-size", str(_RANKS), "--pipeline-schedule"]
    adaptive = ("adaptive:2",)
    limit = "--pipeline-memory-limit"
    asked: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {"v-zb": (("v-zb",), ("v-zb", "--pipeline-replan"))}
    if jobs.can_plan("adaptive"):
        asked["adaptive"] = ((*adaptive, limit, "1"), (*adaptive, limit, "auto"))
    for name, (once, replanning) in asked.items():
        try:
            with tempfile.TemporaryDirectory(prefix="replanned-") as folder:
                first, second = (
                    jobs.train(
                        _RANKS,
                        jobs.Job((*flags, *more), Replanning),
                        shared=True,
                        environment={STANDIN_VARIABLE: _CPU_BYTES, SEARCH_VARIABLE: "0.2"},
                    )
                    for more in (once, (*replanning, "--pipeline-measure", f"{folder}:2-4"))
                )
        except (RankError, ValueError) as error:
            yield {"schedule": name, FAULT: fault_of(error)}
        else:
            yield {"schedule": name, **_compared(first, second, counts=not setting.on_cpu)}


def _compared(first: Any, second: Any, *, counts: bool) -> Row:
    """Returns the differences between a job planned once and one replanned; ``counts``: the allocator counts bytes."""
    switches, logged = zip(*second.found, strict=True)
    bubbles, peaks = zip(*logged[-1], strict=True) if logged[-1] else ((), ())
    fault = ""
    if second.losses != first.losses:
        fault = "losses are not the same"
    elif any(each != switches[0] for each in switches):
        fault = f"ranks switched in different iterations: {switches}"
    elif len(bubbles) != _ITERATIONS or not all(0 < bubble < 1 for bubble in bubbles):
        fault = f"bubbles were logged that are none: {bubbles}"
    elif counts and None in peaks:
        fault = "no peak of activations was seen"
    return {
        "switched in": ", ".join(map(str, switches[0])) or "none",
        "bubble, %": 100 * bubbles[-1] if bubbles else 0.0,
        "peak, MiB": (peaks[-1] or 0.0) / 2**20 if peaks else 0.0,
        FAULT: fault,
    }
