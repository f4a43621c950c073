"""What the benchmark of the host's time says of its rows, and how its ranks take turns."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import host, host_ranks
from benchmarks.host_ranks import Turns, Watch

pytestmark = pytest.mark.pure


def row(job: str, ranks: int, ratio: float, layers: str = "local") -> dict[str, Any]:
    """A row of two steps."""
    known = next(each for each in host._JOBS if each.name == job)
    spread = {"median": ratio, "low": ratio - 0.01, "high": ratio + 0.01}
    seconds = {"median": 0.5, "low": 0.4, "high": 0.6}
    return {
        "layers": layers,
        "job": job,
        "beside": known.beside,
        "most": known.most,
        "pipeline_size": ranks,
        "microbatches": 32,
        "starts": 1,
        "repetitions": 2,
        "split": 12 if known.beside else 0,
        "seconds": seconds,
        "ratio": spread,
    }


ROWS = [
    row("stock 1F1B", 2, 1.0),
    row("`1f1b`", 2, 0.98),
    row("`zb-1p`", 2, 1.04),
    row("`zb-1p`", 4, 1.07),
    row("`zb-1p`", 2, 1.02, "transformer_engine"),
    row("`zb-1p`", 4, 1.03, "transformer_engine"),
]


def test_a_claim_holds_if_it_does_on_all_sizes_and_layers() -> None:
    found = {claim.text: (claim.found, claim.verdict) for claim in host.claims(ROWS)}
    assert found == {
        "A step under `1f1b` takes the host at most 1.00 of the time of stock 1F1B": (
            "local layers: 0.980, on 2 ranks",
            "held",
        ),
        "A step under `zb-1p` takes the host at most 1.05 of the time of stock 1F1B": (
            "local layers: 1.040, 1.070; Transformer Engine's layers: 1.020, 1.030, on 2 and 4 ranks",
            "not held",
        ),
    }


def test_stocks_jobs_are_compared_with_nothing() -> None:
    lines = host.section(ROWS).splitlines()
    assert "| local | stock 1F1B | 2 |  | 500 |  |" in lines
    assert "| local | `zb-1p` | 4 | 12 of 128 | 500 | 1.070 (1.060 to 1.080) |" in lines


def test_each_schedule_is_beside_stock_with_as_many_chunks() -> None:
    from megatron.schedules.planner.registry import own_chunks

    for job in host._JOBS:
        if job.beside:
            name = job.name.strip("`")
            assert ("interleaved" in job.beside) == ((own_chunks(name) or 2) > 1)


@pytest.mark.parametrize(("job", "least", "most"), [("`1f1b`", 0, 0), ("`zb-1p`", 32, 64), ("`v-half`", 4, 128)])
def test_backwards_that_a_job_splits_are_counted(job: str, least: int, most: int) -> None:
    """At least one of each stage stays split, and of two ranks one waits for the other's under ZB-1P."""
    assert least <= host.splits(next(each for each in host._JOBS if each.name == job), "local", 2) <= most


def whose(turns: Turns) -> int:
    """The one rank that may work."""
    (number,) = [number for number, turn in enumerate(turns._turns) if turn.acquire(block=False)]
    return number


def test_each_rank_works_once_in_a_round() -> None:
    turns, order = Turns(4), []
    for _ in range(12):
        order.append(whose(turns))
        turns.pass_on(order[-1], ended=False)
    assert [sorted(order[at : at + 4]) for at in (0, 4, 8)] == [[0, 1, 2, 3]] * 3


def test_who_has_ended_a_step_waits_for_all_others() -> None:
    turns, steps, order = Turns(3), [0, 0, 0], []
    for turn in range(14):
        order.append(whose(turns))
        ended = order[-1] < 2 or turn % 7 == 6  # a step of ranks 0 and 1 is one turn, one of rank 2 five
        steps[order[-1]] += ended
        turns.pass_on(order[-1], ended)
    assert steps == [2, 2, 2]
    assert [sorted(order[at : at + 7]) for at in (0, 7)] == [[0, 1, 2, 2, 2, 2, 2]] * 2


def test_only_own_turns_of_a_step_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    class Waited(Turns):
        def wait(self, number: int) -> None:
            nonlocal now
            super().wait(number)
            now += 100.0

    monkeypatch.setattr(host_ranks.time, "thread_time", lambda: now)
    watch = Watch(Waited(1), 0)
    for _ in range(2):
        now += 7.0
        before = now
        watch.pause()  # a forward of no counted step
        assert now == before
        watch.begin()
        for worked in (0.25, 0.5, 0.0):
            now += worked
            watch.pause()
        now += 1.0
        assert watch.end() == pytest.approx(1.75)
