"""A rank of a job that sleeps grows slow: it is named, planned round, and iterations get as short as simulated."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys

import pytest

from tests.runtime import emulated_replanning as job
from tests.waiting import HANGS_S

ITERATIONS = 18


@pytest.mark.nightly
def test_a_slow_rank_is_named_and_worked_round_as_simulated() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.runtime.emulated_replanning", "4", str(ITERATIONS)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"},
        capture_output=True,
        text=True,
        timeout=HANGS_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    said, first = found["said"], found["first"]
    assert said == [said[0]] * job.RANKS
    slow, replanned = said[0]
    named = re.fullmatch(rf"rank {job.SLOW_RANK} is slow: ([\d.]+)", slow)
    assert named is not None and float(named[1]) == pytest.approx(job.SLOWER, rel=0.05)
    assert replanned.startswith("replanned: iteration ")

    assert first == [first[0]] * job.RANKS, "ranks switched at different iterations"
    switch = first[0].index(False)
    assert first[0] == [True] * switch + [False] * (ITERATIONS - switch)
    before = statistics.median(found["ms"][job.FROM : switch])
    after = statistics.median(found["ms"][switch:])
    assert after < 0.95 * before
    assert before == pytest.approx(found["without"], rel=0.05)
    assert after == pytest.approx(found["best"], rel=0.05)
