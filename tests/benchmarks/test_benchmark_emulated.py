"""benchmarks/: every engine runs, a failing rank says why, and verdicts follow the rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import click
import pytest

from benchmarks import emulated, lengths_section, messages_section, saving, saving_section
from benchmarks.emulated_section import KEY, claims, section

pytestmark = pytest.mark.nightly

ENGINES = {
    "megatron-core": {"1F1B", "interleaved"},
    "torch": {"1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBV"},
    "ours": {"1f1b", "interleaved-1f1b", "zb-1p", "v-min", "v-half", "v-zb", "adaptive 0.5", "adaptive 1"},
}

JOB = """
import json
from benchmarks import emulated, lengths, messages, saving
from benchmarks.emulated_ranks import RankError, run_ranks

emulated.UNIT_S, emulated._REPETITIONS = 0.002, 1
rows = list(emulated.measure(True, lambda text: None, 2, 4, "1,1.1,0.75"))
saving.UNIT_S, saving.SEARCH_SECONDS = 0.002, 0.05
saved = list(saving.setting(2, 4, [0.375], 1, lambda text: None))
lengths._RANKS, lengths._UNIT_S, lengths._QUICK_SETS, lengths._EMULATED = 2, 0.002, 1, ("v-zb", "1f1b")
by_length = list(lengths.measure(True, lambda text: None))
messages._UNIT_S, messages._LIMITS = 0.002, (2.5,)
behind = list(messages.setting(2, 4, 1, lambda text: None))

def fail():
    import torch.distributed as dist
    if dist.get_rank() == 1:
        raise ValueError("what went wrong")
    dist.barrier()

try:
    run_ranks(2, fail, timeout=60)
except RankError as error:
    print(json.dumps([rows, saved, by_length, behind, str(error)]))
"""


@pytest.fixture(scope="module")
def job() -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]], str]:
    """The rows of all four, and what is said of a rank that fails."""
    # In a process of its own: ranks are forked, and the tests' process may have threads.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run([sys.executable, "-c", JOB], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    emulated, saved, by_length, behind, error = json.loads(done.stdout.splitlines()[-1])
    return emulated, saved, by_length, behind, error


def test_every_engine_runs_and_a_failing_rank_says_why(job):
    rows, *_, error = job
    assert "rank 1 failed" in error and "ValueError: what went wrong" in error
    assert {engine: {r["schedule"] for r in rows if r["engine"] == engine} for engine in ENGINES} == ENGINES
    assert (rows[0]["engine"], rows[0]["schedule"], rows[0]["speedup_over_stock_1f1b"]) == ("megatron-core", "1F1B", 1)
    for row in rows:
        assert row["pipeline_size"] == 2 and row["microbatches"] == 4 and row["costs"] == "1,1.1,0.75"
        assert 0 < row["low"] <= row["seconds"] <= row["high"]
        # At least 2 x 4 x (F + I + W) on each rank; a busy machine may make it much more.
        assert row["seconds"] > 0.95 * 8 * 2.85 * 0.002
        assert row["simulated_seconds_without_latency"] <= row["simulated_seconds"]
        assert 1 <= row["memory"] <= 2.5
        assert 0 <= row["latency_seconds"] <= 0.001 and 0 <= row["latency_seconds_beforehand"] <= 0.001
    assert len(claims(rows)) == 2  # of a size that the claims about V-ZB, V-Half and adaptive are not about
    assert "ours v-zb" in section(rows)


def test_memory_saving_runs_and_holds_what_is_planned(job):
    _, rows, *_ = job
    stock = [row for row in rows if row["engine"] == "megatron-core"]
    ours = {(row["schedule"], row["memory_saving"]): row for row in rows if row["engine"] == "ours"}
    assert [row["memory_saving"] for row in stock] == list(saving.STOCK)
    # Less than one microbatch's: without memory saving nothing runs.
    expected = [("v-zb", "nothing"), *(("adaptive 0.375", saved) for saved in ("R", "O, L", "R, O, L"))]
    assert list(ours) == expected
    assert ours["adaptive 0.375", "R"]["recomputed"] > 0 and ours["adaptive 0.375", "O, L"]["offloaded"] > 0
    for row in rows:
        assert row["seconds"] > 0.95 * 4 * 5.7 * 0.002 and row["simulated_seconds"] > 0
    for row in ours.values():
        assert row["measured_bytes"] == pytest.approx(row["planned_bytes"], rel=0.01), row["schedule"]
    everything, full, core, other = (max(row["measured_bytes"]) for row in stock)
    assert full < core < everything and full < other < everything
    assert all(row["time_over_stock_1f1b"] > 0 for row in stock)
    claims = saving_section.claims([rows[0], *({**row, "error": 0.04} for row in rows[1:])])
    assert "not held" in [claim.verdict for claim in claims]
    assert "| ours adaptive 0.375 | recompute |" in saving_section.section(rows)


def test_iterations_of_different_lengths_run_as_planned_for_both(job):
    _, _, rows, _, _ = job
    simulated, emulated = ([row for row in rows if row["what"] == what] for what in ("simulated", "emulated"))
    assert [row["schedule"] for row in simulated] == ["v-zb", "1f1b"]
    for row in simulated:
        assert 1 < row["planned_mean"] <= row["planned_worst"] < row["usual_mean"] <= row["usual_worst"]
    assert [(row["schedule"], row["planned_for"]) for row in emulated] == [
        (name, planned) for name in ("v-zb", "1f1b") for planned in ("equal", "lengths")
    ]
    assert all(0.5 * row["simulated_seconds"] < row["seconds"] for row in emulated)
    assert emulated[1]["simulated_seconds"] < emulated[0]["simulated_seconds"]
    over_work = {"usual_mean": 1.4, "usual_worst": 1.6, "planned_mean": 1.1, "planned_worst": 1.2}
    good = [*({**row, **over_work} for row in simulated), *({**row, "error": 0.01} for row in emulated)]
    assert missed(good) == []
    for worse, what in (
        ({"planned_mean": 1.4}, "saves at least 7%"),
        ({"processor_seconds_worst": 1.2}, "under a second"),
        ({"planned_worst": 1.5}, "the worst iteration's time"),
    ):
        (line,) = missed([{**good[0], **worse}, *good[1:]])
        assert what in line
    (line,) = missed([*good[:-1], {**good[-1], "error": -0.04}])
    assert "the simulated time" in line
    assert "| packed, median 2,000 | 16 |" in lengths_section.section(good)


def test_messages_run_exposed_hidden_and_left_out(job):
    *_, rows, _ = job
    assert [(row["engine"], row["schedule"], row["messages"]) for row in rows] == [
        ("megatron-core", "interleaved", "exposed"),
        ("megatron-core", "interleaved", "none"),
        *(("ours", name, messages) for name in ("v-zb", "v-half", "zb-1p") for messages in ("hidden", "exposed")),
        ("ours", "adaptive 1.25", "hidden"),
    ]
    for row in rows:
        message = 0 if row["messages"] == "none" else 0.3
        computing = 2.85 + (2 * message if row["messages"] == "exposed" else 0)
        assert row["seconds"] > 0.95 * 8 * computing * 0.002
        assert (row["hidden"] > 0) == (row["messages"] == "hidden") and row["hidden"] < 1
        assert row["simulated_seconds"] > 0 and 1 <= row["memory"] <= 3
    good = [{**row, "error": 0.01, "seconds": 1.0, "speedup_over_stock_exposed": 1.1} for row in rows]
    good[1]["seconds"] = 1.01
    assert [claim.verdict for claim in messages_section.claims(good)] == ["held"] * 3
    for worse, held in (
        ({"error": -0.031}, [False, True, True]),
        ({"speedup_over_stock_exposed": 1.0}, [True, False, True]),
    ):
        found = messages_section.claims([*good[:-1], {**good[-1], **worse}])
        assert [claim.verdict == "held" for claim in found] == held
    found = messages_section.claims([good[0], {**good[1], "seconds": 0.99}, *good[2:]])
    assert [claim.verdict for claim in found] == ["held", "held", "not held"]
    assert "% hidden | 1.000 | +1.0% | 1.100 |" in messages_section.section(good)


def missed(rows: list[dict[str, Any]]) -> list[str]:
    return [claim.text for claim in lengths_section.claims(rows) if claim.verdict != "held"]


@pytest.mark.parametrize("costs", ["1,1", "1,1,x", "1,1,0", "1,1,1,0.05"])
def test_costs_that_make_no_sense_are_refused(costs: str):
    with pytest.raises(click.BadParameter):
        next(emulated.measure(False, lambda text: None, 8, 16, costs))


def row(engine: str, schedule: str, seconds: float, memory: float, error: float = 0.01) -> dict[str, Any]:
    return {
        "engine": engine,
        "schedule": schedule,
        **dict(zip(("pipeline_size", "microbatches", "costs"), KEY, strict=True)),
        "seconds": seconds,
        "low": seconds,
        "high": seconds,
        "simulated_seconds": seconds,
        "simulated_seconds_without_latency": seconds,
        "latency_seconds": 0.0003,
        "latency_seconds_beforehand": 0.0004,
        "error": error,
        "speedup_over_stock_1f1b": 2.6 / seconds,
        "memory": memory,
    }


def rows(**changed: dict[str, Any]) -> list[dict[str, Any]]:
    made = {
        "stock": row("megatron-core", "1F1B", 2.6, 8, error=0.2),
        "zbv": row("torch", "ZBV", 2.0, 8),
        "v_zb": row("ours", "v-zb", 1.99, 8),
        "v_half": row("ours", "v-half", 2.3, 5),
        "adaptive": row("ours", "adaptive 0.5", 2.6, 4),
    }
    return list((made | changed).values())


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, [True] * 5),
        ({"v_zb": row("ours", "v-zb", 2.01, 8, error=-0.031)}, [False, False, True, True, True]),
        ({"v_half": row("ours", "v-half", 2.6, 5)}, [True, True, False, True, True]),
        ({"v_half": row("ours", "v-half", 2.3, 6)}, [True, True, False, True, True]),
        ({"adaptive": row("ours", "adaptive 0.5", 2.61, 4)}, [True, True, True, False, True]),
        ({"zbv": row("torch", "ZBV", 1.95, 8)}, [True, True, True, True, False]),
    ],
)
def test_a_claim_that_fails_says_so(changed: dict[str, Any], expected: list[bool]):
    assert [claim.verdict == "held" for claim in claims(rows(**changed))] == expected


def test_the_page_says_which_schedule_is_the_fastest_how_often():
    assert "Fastest: ours v-zb in 1." in section(rows())
    assert "Fastest: torch ZBV in 1." in section(rows(zbv=row("torch", "ZBV", 1.95, 8)))
