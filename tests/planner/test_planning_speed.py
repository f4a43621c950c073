"""Plans of usual size take a second or two, and time grows with the passes alone.

A second is a machine's own: that of a loop which takes a fifth of a second on a quiet one, measured before and after.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.schedules.planner.registry import Request, plan
from megatron.schedules.search import polish
from megatron.schedules.utils.private_folder import PLANS_VARIABLE
from tests.counting import lines_run
from tests.planner.made_schedules import NAMED, UNIT, plan_and_seconds
from tests.tiers import by_night, some_by_night

anew = plan_and_seconds.__wrapped__


def seconds(name: str, ranks: int, microbatches: int, most: float) -> float:
    """What planning takes; measured again where that is above ``most``, for machines have their moments."""
    taken = []
    for _ in range(3):
        before = _loop()
        planning = anew(name, ranks, microbatches, UNIT, 2)[1]
        taken.append(0.2 * planning / max(before, _loop()))
        if taken[-1] < most:
            break
    return min(taken)


def _loop() -> float:
    """Processor time of work like a planner's: numbers, tuples and lists."""
    begun, number = time.process_time(), 0
    held: list[tuple[int, int]] = []
    for index in range(1_500_000):
        number = (number * 31 + index) & 0xFFFF
        held.append((number, index))
        if len(held) > 100:
            held.clear()
    return time.process_time() - begun


@pytest.mark.parametrize("name", some_by_night(NAMED, lambda name: name != "v-half"))
def test_32_ranks_and_128_microbatches_take_less_than_two_seconds(name: str):
    assert seconds(name, 32, 128, most=2) < 2


@pytest.mark.parametrize(
    "name",
    ["1f1b", *(by_night(each) for each in ("interleaved-1f1b", "zb-1p", "v-half"))],
)
def test_four_times_the_microbatches_take_about_four_times_the_work(name: str):
    """In lines of Python, at most twice that; growing with the square it would be four times."""
    assert lines(name, 8, 512) < 2 * 4 * lines(name, 8, 128)


def lines(name: str, ranks: int, microbatches: int) -> int:
    """How many lines of Python are run to plan."""
    return lines_run(lambda: plan(Request(name, ranks, microbatches)))


@pytest.mark.parametrize("name", some_by_night(NAMED, lambda name: name != "v-half"))
def test_eight_times_the_passes_take_eight_times_the_work(name: str, monkeypatch: pytest.MonkeyPatch):
    """Twice the ranks and four times the microbatches, in as few rounds as large plans get."""
    monkeypatch.setattr(polish, "_PASSES", 0)
    assert lines(name, 16, 128) < 1.1 * 8 * lines(name, 8, 32)


@pytest.mark.nightly
@pytest.mark.parametrize(("ranks", "microbatches", "most_seconds"), [(64, 512, 5), (128, 2048, 60)])
def test_large_plans_take_a_minute_and_a_gigabyte_at_most(
    ranks: int, microbatches: int, most_seconds: float, tmp_path: Path
):
    """The whole command, with nothing kept: neither plans nor machine code."""
    size = ["--pipeline-size", str(ranks), "--microbatches", str(microbatches)]
    command = [sys.executable, "-m", "megatron.schedules", "plan", "--schedule", "v-half", *size]
    taken = []
    for attempt in ("first", "again, for machines have their moments"):
        environment = os.environ | {PLANS_VARIABLE: str(tmp_path / attempt)}
        with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as process:
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0
        assert used.ru_maxrss < 1_000_000, "kilobytes"
        taken.append(used.ru_utime + used.ru_stime)
        if taken[-1] < most_seconds:
            break
    assert min(taken) < most_seconds
