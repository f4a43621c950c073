"""The trace is what Perfetto reads: the fields of Chrome's trace event format, and all passes of all views."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest

from megatron.schedules.report.drawing import drawn, of_plans, of_run
from megatron.schedules.report.idle import idle
from megatron.schedules.schedule.costs import Costs
from tests.measure.test_recorded_run import made
from tests.report.made import saved

# By phase of an event, the fields that the format asks for: metadata, complete events, counters.
FIELDS = {
    "M": {"name": str, "ph": str, "pid": int, "args": dict},
    "X": {
        "name": str,
        "cat": str,
        "ph": str,
        "ts": (int, float),
        "dur": (int, float),
        "pid": int,
        "tid": int,
        "args": dict,
    },
    "C": {"name": str, "ph": str, "ts": (int, float), "pid": int, "args": dict},
}


def events(text: str) -> list[dict[str, Any]]:
    data = json.loads(text)
    assert data["displayTimeUnit"] == "ms"
    return data["traceEvents"]


@pytest.mark.parametrize("of", ["run", "copies"])
def test_every_event_has_the_fields_of_its_phase(of: str):
    for event in events(drawn(of_run(made(Costs())) if of == "run" else of_plans([saved()], "", ""), "trace")):
        fields = FIELDS[event["ph"]]
        assert fields.keys() <= event.keys() <= {*fields, "tid"}
        assert all(isinstance(event[name], kind) for name, kind in fields.items())
        if event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] >= 0
        if event["ph"] == "C":
            assert all(isinstance(value, float) for value in event["args"].values()), "counters are numbers"


def test_a_run_has_a_process_for_each_rank_of_plan_and_measurement():
    recorded = made(Costs.of(1.5, 1.25, 0.75, 0.5))
    found = events(drawn(of_run(recorded), "trace"))
    names = {event["pid"]: event["args"]["name"] for event in found if event["name"] == "process_name"}
    assert sorted(names.values()) == sorted(f"{of} rank {r}" for of in ("planned", "measured") for r in range(4))
    spans: dict[str, dict[str, tuple[float, float]]] = defaultdict(dict)
    for event in found:
        if event["ph"] == "X" and event["cat"] != "idle":
            assert event["tid"] == 0
            spans[names[event["pid"]]][event["name"]] = event["ts"], event["dur"]
    timeline = recorded.timeline
    for rank, row in enumerate(timeline.schedule.order):
        expected = {
            str(work): (pytest.approx(1e3 * start, abs=1e-3), pytest.approx(1e3 * (end - start), abs=2e-3))
            for work, start, end in zip(row, timeline.start[rank], timeline.end[rank], strict=True)
        }
        assert spans[f"measured rank {rank}"] == expected
        assert spans[f"planned rank {rank}"].keys() == expected.keys()


def test_nothing_of_one_thread_overlaps():
    for drawing in (of_run(made(Costs.of(1.3, 1.1, 0.7, 0.05))), of_plans([saved()], "", "")):
        threads: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
        for event in events(drawn(drawing, "trace")):
            if event["ph"] == "X":
                threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        for spans in threads.values():
            for (_, end), (start, _) in pairwise(sorted(spans)):
                assert start >= end - 1e-6


def test_idle_time_and_memory_are_those_of_the_run():
    recorded = made(Costs.of(1.5, 1.25, 0.75, 0.5))
    found = events(drawn(of_run(recorded), "trace"))
    pids = {event["args"]["name"]: event["pid"] for event in found if event["name"] == "process_name"}
    for each in idle(recorded.timeline):
        pid = pids[f"measured rank {each.rank}"]
        spent = [event["dur"] for event in found if event["pid"] == pid and event.get("cat") == "idle"]
        assert sum(spent) == pytest.approx(1e3 * each.total, abs=0.1)
        held = [e["args"]["bytes"] for e in found if e["pid"] == pid and e["ph"] == "C"]
        assert max(held) == pytest.approx(max(amount for _, amount in recorded.held[each.rank]))
        assert held[-1] == 0


def test_copies_have_threads_of_their_own():
    found = events(drawn(of_plans([saved()], "", ""), "trace"))
    threads = {event["args"]["name"] for event in found if event["name"] == "thread_name"}
    assert threads == {"computing", "offloaded to the host", "loaded back", "idle"}
    assert {event["name"][1] for event in found if event["ph"] == "X" and event["tid"] == 1} == {"O"}
