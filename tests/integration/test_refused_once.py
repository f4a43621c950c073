"""A job that is refused says so exactly once, whichever of its processes comes to it first."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).resolve().parents[2]
LINE = "rank.py: error: no such schedule\n"
# A rank that imports for so many seconds, and then refuses; or one that goes on.
RANK = """
import sys, time
sys.argv[0] = "rank.py"
from megatron.schedules.integration import refuse
refuse._PATIENCE = float(sys.argv[3])
time.sleep(float(sys.argv[1]))
if sys.argv[2] == "refuse":
    refuse.refuse("no such schedule")
time.sleep(60)
"""
OTHER = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "SLURM_LOCALID")


def launched(
    ranks: Sequence[tuple[float, str, Mapping[str, str]]], *, kills: bool, patience: float = 40.0
) -> tuple[str, list[int]]:
    """What ranks say on standard error and how they end, under a launcher that ends all others once one has ended.

    Args:
        ranks: of each, seconds until it refuses, whether it does, and its environment.
        kills: whether the launcher does so, as torchrun does; srun may not.
        patience: how long a rank waits for a lower one.
    """
    around = {name: value for name, value in os.environ.items() if name not in OTHER} | {
        "MASTER_PORT": str(os.getpid())
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(late), does, str(patience)],
            cwd=ROOT,
            env=around | dict(own),
            stderr=subprocess.PIPE,
            text=True,
        )
        for late, does, own in ranks
    ]
    try:
        while kills and all(each.poll() is None for each in processes):
            time.sleep(0.02)
        for each in processes:
            if kills:
                each.terminate()
        said = [each.communicate(timeout=60)[1] for each in processes]
    finally:
        for each in processes:
            each.kill()
            each.wait()
    return "".join(said), [each.returncode for each in processes]


def torchrun(rank: int) -> dict[str, str]:
    return {"RANK": str(rank), "LOCAL_RANK": str(rank)}


def srun(rank: int) -> dict[str, str]:
    return {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("slow", [0, 1, 2], ids=lambda slow: f"rank {slow} is slow")
def test_under_torchrun_one_line_is_printed_whichever_rank_is_slow(slow: int):
    text, statuses = launched([(2.0 * (rank == slow), "refuse", torchrun(rank)) for rank in range(3)], kills=True)
    assert text == LINE
    assert statuses[0] == 2


@pytest.mark.timeout(120)
def test_under_a_launcher_that_kills_nobody_one_line_is_printed_and_all_end_with_status_2():
    assert launched([(1.0, "refuse", srun(0)), (0.0, "refuse", srun(1)), (0.0, "refuse", srun(2))], kills=False) == (
        LINE,
        [2, 2, 2],
    )


@pytest.mark.timeout(120)
def test_where_the_first_rank_goes_on_the_next_says_why():
    ranks = [(0.0, "refuse" if rank else "go on", torchrun(rank)) for rank in range(3)]
    text, statuses = launched(ranks, kills=True, patience=1.0)
    assert text == LINE
    assert statuses[1] == 2


@pytest.mark.timeout(120)
def test_on_a_machine_without_the_first_rank_the_refusal_is_not_lost():
    text, statuses = launched([(0.0, "refuse", {"RANK": "8", "LOCAL_RANK": "0"})], kills=True, patience=1.0)
    assert (text, statuses) == (LINE, [2])


@pytest.mark.timeout(120)
def test_a_process_whose_number_cannot_be_read_speaks_for_itself():
    assert launched([(0.0, "refuse", {"RANK": "²"})], kills=True) == (LINE, [2])
