"""benchmarks/split.py and memory.py: what is made of the figures, and that a missed claim is said to be."""

from __future__ import annotations

import pytest

from benchmarks import apart, memory, memory_saving, split
from benchmarks.memory import Peaks, memory_row
from benchmarks.parts import Claim
from benchmarks.split import Pair, layer_row


def layer(ratio: float, hidden: int = 512) -> dict:
    pairs = [Pair(1.0, 1.0, 0.5, ratio - 0.5 + noise) for noise in (-0.2, -0.1, 0.0, 0.1, 0.2)]
    return layer_row(pairs) | {"device": "one thread of the CPU", "hidden_size": hidden, "sequence_length": 256}


def engine(microseconds: float) -> dict:
    row = {"what": "engine", "schedule": "v-half", "pipeline_size": 4, "message_bytes": 4, "passes": 90}
    times = {"engine_microseconds": microseconds, "engine_quartiles": [0.9 * microseconds, 1.1 * microseconds]}
    return row | times | {"process_microseconds": 2 * microseconds}


def test_a_ratio_is_the_median_of_pairs_and_not_of_parts():
    row = layer_row([Pair(1, 1, 0.6, 0.4), Pair(1, 2, 1.2, 0.9), Pair(1, 4, 2.4, 2.0), Pair(1, 1, 0.7, 0.5)])
    assert row["ratio"] == pytest.approx((1.05 + 1.1) / 2)
    assert row["whole_seconds"] == {"median": 1.5, "low": 1, "high": 4}
    assert row["ratio_quartiles"][0] < row["ratio"] < row["ratio_quartiles"][1]


@pytest.mark.parametrize(
    ("ratios", "found", "verdict"),
    [
        ((1.01, 1.03), "1.010 to 1.030, 2 of 2 layers within", "held"),
        ((1.01, 1.031), "1.010 to 1.031, 1 of 2 layers within, not hidden 512, sequence 256 (1.031)", "not held"),
    ],
)
def test_the_worst_layer_decides(ratios, found, verdict):
    rows = [layer(ratio) for ratio in ratios]
    (claim,) = split.claims(rows)
    assert (claim.found, claim.verdict) == (found, verdict)
    assert "| hidden 512, sequence 256 |" in split.section(rows)


@pytest.mark.parametrize(("most", "found", "verdict"), [(100.0, "100", "held"), (100.6, "101", "not held")])
def test_the_slowest_engine_decides(most, found, verdict):
    rows = [engine(20), engine(most)]
    (claim,) = split.claims(rows)
    assert (claim.found, claim.verdict) == (found, verdict)
    assert "I + W" not in split.section(rows)


def peaks(*planned: float, one: int = 1000, times: float = 1.0) -> list[Peaks]:
    return [Peaks(count, one, round(count * one * times)) for count in planned]


def test_bytes_are_compared_rank_by_rank():
    found = [Peaks(4, 1000, 4000), Peaks(3, 1000, 2400)]
    row = memory_row("zb-1p", 2, found, peaks(8, 4))
    assert row["planned_bytes"] == [4000, 3000] and row["measured_bytes"] == [4000, 2400]
    assert row["worst_error"] == pytest.approx(-0.2)
    assert (row["ratio"], row["planned_ratio"]) == (0.5, 0.5)


@pytest.mark.parametrize(("times", "verdict"), [(1.09, "held"), (1.11, "not held"), (0.89, "not held")])
def test_the_worst_rank_decides(times, verdict):
    exact = memory_row("1f1b", 4, peaks(4, 3), peaks(4))
    row = memory_row("v-zb", 4, peaks(4, 4, times=times), peaks(4))
    claim = next(claim for claim in memory.claims([exact, row]) if claim.text.startswith("Every rank"))
    assert claim.verdict == verdict and "v-zb, 4 ranks" in claim.found


@pytest.mark.parametrize(("schedule", "held", "missed"), [("v-half", 0.70, 0.71), ("v-min", 0.55, 0.56)])
def test_shares_of_1f1b_are_claimed_at_eight_ranks(schedule, held, missed):
    def claims(share: float, size: int) -> list[Claim]:
        rows = [memory_row(schedule, size, peaks(8 * share), peaks(8))]
        return [claim for claim in memory.claims(rows) if claim.text == text]

    text = f"`{schedule}` holds at most {held:.2f} of 1F1B's activations at 8 ranks"
    assert claims(held, 8) == [Claim(text, f"{held:.3f}, planned {held:.3f}", "held")]
    assert claims(missed, 8) == [Claim(text, f"{missed:.3f}, planned {missed:.3f}", "not held")]
    assert claims(held, 4) == []


def three(quick: bool, say):
    say(f"quick: {quick}")
    yield {"row": 1}
    yield {"row": 2}


def fails(quick: bool, say):
    yield {"row": 1}
    raise ValueError("no more rows")


def test_rows_come_from_another_process(capfd):
    said: list[str] = []
    assert list(apart.rows_apart(three, True, said.append)) == [{"row": 1}, {"row": 2}]
    assert said == ["quick: True"]
    rows = apart.rows_apart(fails, False, said.append)
    assert next(rows) == {"row": 1}
    with pytest.raises(RuntimeError, match="failed; the lines above say why"):
        next(rows)
    assert "no more rows" in capfd.readouterr().err


def test_plans_that_save_memory_have_their_own_verdicts():
    def claims(times: float, said: float) -> list[Claim]:
        held = [memory_saving.Held(2, round(2000 * times), 1.5, said, 1500)] * 4
        rows = [
            memory_row("1f1b", 4, peaks(4), peaks(4)),
            memory_saving.memory_saving_row("0.5", "offload", 1000, held),
        ]
        assert "| 50.0% | " in memory.section(rows)
        device, host = memory.claims(rows)[-2:]
        assert "every rank holds what is planned" in device.text and "host memory" in host.text
        return [device, host]

    for claim in claims(1.04, 1450):
        assert claim.verdict == "held" and "offload within 50.0%" in claim.found
    for claim in claims(0.94, 1400):
        assert claim.verdict == "not held"
