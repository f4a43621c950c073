"""Damaged and hostile JSON files: the command line does what it is asked, or refuses in one line with status 2."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.schedules.cli.commands import main
from megatron.schedules.measure.job_profile import JobProfile, Measured, StageProfile
from megatron.schedules.measure.job_profile_json import to_text as job_profile_text
from megatron.schedules.measure.profile_facts import CopyRates, Facts
from megatron.schedules.measure.recorded_run import Recorded
from megatron.schedules.measure.recorded_run import to_text as recorded_text
from megatron.schedules.planner.registry import Request, plan
from megatron.schedules.schedule.cost_parts import HostCopies, LayerTimes, Link
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.decisions import Decisions
from megatron.schedules.schedule.kinds import Kind, Share
from megatron.schedules.schedule.placement import sequential, v_shape
from megatron.schedules.schedule.simulator import simulate
from tests.planner.made_schedules import written

# As JSON, what may stand where something else should.
WRONG = (
    """
    null true "" "x" "\\ud800" "\\u0000" [] {} [[]] [null] {"a":1} -1 0 -0.0 0.5 1 2 3.5 1e-320 1e-15 1e15 1e308 1e400
    99999999999999999999999999999999999999999 NaN Infinity -Infinity
""".split()
    + ["9" * 5000, "[" * 5000 + "]" * 5000, '{"a":' * 5000 + "1" + "}" * 5000, '"' + "y" * 5000 + '"']
)
# How many single changes of each file are tried; all of them are some thousands.
CHANGES = 250
_HERE = "the value that stands here is another one"
_TWICE = "twice"


def a_jobs_profile(**more: Any) -> JobProfile:
    """With layers that are recomputed and offloaded."""
    times = dict.fromkeys((Kind.F, Kind.I, Kind.W, Kind.B, Kind.R, Kind.O, Kind.L), Measured(2.0, 1.5, 2.5))
    sizes = {Share.WEIGHTS: 500.0, Share.VOCABULARY: 0.0, Share.RECOMPUTED: 200.0, Share.OFFLOADED: 300.0}
    stage = StageProfile(2, times, held=1000.0, sizes=sizes, recomputed=0.5)
    facts = Facts("a GPU", 8, 64, 4, 128, 1, 1, vocabulary=512, dtype="bf16")
    return JobProfile(
        facts,
        "v-half",
        v_shape(2),
        8,
        (3, 5),
        1,
        (stage,) * 4,
        ((0, 1, 0.1), (1, 0, 0.1)),
        CopyRates(5e-3, 4e-3, 3e-3),
        **more,
    )


def a_run(offloaded: bool = True) -> Recorded:
    """One that copies, recomputes and counted bytes, or another that does neither."""
    decisions = Decisions(recomputed=(0.5,) * 2, offloaded=(0.5,) * 2) if offloaded else Decisions()
    costs = Costs(LayerTimes(1.0, 1.25, 0.75), link=Link(pairs=((0, 1, 0.25),)), copies=HostCopies(0.5))
    schedule = written(sequential(2), 2, "0F0 0O0 0F1 0L0 0I0 0W0 0R1 0B1", "1F0 1I0 1F1 1B1 1W0")
    schedule = schedule if offloaded else plan(Request("v-half", 2, 2))
    timeline, planned = (
        simulate(schedule, each.on(schedule.placement, decisions))
        for each in (replace(costs, link=replace(costs.link, latency=0.1)), costs)
    )
    held = tuple(tuple((time, 1000.0 * amount) for time, amount in timeline.memory(rank)) for rank in range(2))
    return Recorded(timeline, planned, 12, "a device", held if offloaded else ())


def paths(data: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each value in ``data``: keys and indices."""
    yield at
    for key in data if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ():
        yield from paths(data[key], (*at, key))


def changed(data: Any, path: tuple[Any, ...], text: str | None) -> str:
    """``data`` as JSON, with ``text`` for what is at ``path``; without that and its key where there is no text."""
    copy = json.loads(json.dumps([data]))
    inner = copy
    for key in (0, *path[:-1]) if path else ():
        inner = inner[key]
    last = path[-1] if path else 0
    if text is None:
        del inner[last]
    else:
        inner[last] = _HERE
    return json.dumps(copy[0] if copy else {}).replace(json.dumps(_HERE), text or "")


def twice(data: Any, path: tuple[Any, ...]) -> str:
    """``data`` as JSON, the value at ``path`` twice in its list."""
    inner = data
    for key in path:
        inner = inner[key]
    if not path or isinstance(path[-1], str):
        return changed(data, path, json.dumps([inner, inner]))
    return changed(data, path, f"{json.dumps(inner)}, {json.dumps(inner)}")


def damaged(data: Any, seed: int) -> Iterator[bytes]:
    """Single changes of a good file, each field's turn as often as any other's; and what is no JSON at all."""
    whole, chance = json.dumps(data), random.Random(seed)
    yield from (whole[: len(whole) * part // 7].encode() for part in range(7))
    yield from (whole.encode("utf-16"), b"\xff\xfe\x00", whole.encode() + b"{}", b"\xef\xbb\xbf" + whole.encode())
    yield from (text.encode() for text in WRONG)
    found = [*paths(data)]
    # The fields of one name and depth are alike; each sort is tried as often as any other.
    sorts: dict[tuple[Any, ...], list[tuple[Any, ...]]] = {}
    for path in found:
        sorts.setdefault(tuple(key if isinstance(key, str) else 0 for key in path), []).append(path)
    changes = [[chance.choice(alike) for _ in WRONG] for alike in chance.sample(list(sorts.values()), len(sorts))]
    texts = [*WRONG, None, _TWICE]
    every = [(path, chance.choice(texts)) for turn in zip(*changes, strict=True) for path in turn]
    for path, text in every[:CHANGES]:
        yield (twice(data, path) if text == _TWICE else changed(data, path, text)).encode()


def files(kind: str) -> Any:
    """A good file of each format, parsed."""
    return {
        "job": lambda: json.loads(job_profile_text(a_jobs_profile())),
        "run": lambda: json.loads(recorded_text(a_run())),
        "plain run": lambda: json.loads(recorded_text(a_run(offloaded=False))),
    }[kind]()


SIZE = ["--pipeline-size", "2", "--microbatches", "2"]
PROFILED = {
    "plan": ["plan", "--schedule", "v-half", *SIZE],
    "compare": ["compare", "--schedule", "1f1b", "--schedule", "zb-1p", "--schedule", "v-min", *SIZE],
    "text": ["draw", "--format", "text", *SIZE],
    "html": ["draw", "--format", "html", *SIZE],
    "trace": ["draw", "--format", "trace", *SIZE],
}
RECORDED = {form: ["draw", "--format", form] for form in ("svg", "text", "html", "trace")}


def ends_well(arguments: list[str], flag: str, path: Path, capsys: pytest.CaptureFixture[str]) -> bool:
    """Whether ``arguments`` were carried out; asserts one line, naming flag and file, where they were not."""
    status = main([*arguments, flag, str(path)])
    out, err = capsys.readouterr()
    if status == 0:
        assert out and "Traceback" not in err
        return True
    assert (status, out, err.count("\n")) == (2, "", 1), err
    assert flag in err and str(path) in err, err
    return False


@pytest.mark.parametrize(
    ("kind", "flag", "commands"),
    [
        ("job", "--costs", PROFILED),
        ("run", "--recorded", RECORDED),
        ("plain run", "--recorded", RECORDED),
    ],
)
def test_a_damaged_file_is_read_or_refused_in_one_line(
    kind: str, flag: str, commands: dict[str, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path, good = tmp_path / "file.json", files(kind)
    path.write_text(json.dumps(good))
    for arguments in commands.values():
        assert ends_well(arguments, flag, path, capsys)
    read = 0
    for index, text in enumerate(damaged(good, seed=len(kind))):
        path.write_bytes(text)
        arguments = [*commands.values()][index % len(commands)]
        read += ends_well(arguments, flag, path, capsys)
    assert read > CHANGES // 20, "some changes leave a file as good as another"
