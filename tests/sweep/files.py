"""Files that programs read, good and hostile, and odd places to read from or write to."""

from __future__ import annotations

import copy
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.schedules.measure import job_profile_json, recorded_run
from megatron.schedules.planner.registry import Request, plan
from megatron.schedules.schedule.cost_parts import LayerTimes, Link
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.placement import v_shape
from megatron.schedules.schedule.text_forms import to_csv
from tests.measure.custom import profiled
from tests.measure.test_job_profile import V, profile
from tests.measure.test_recorded_run import made

# What may stand in the place of a value in JSON.
_ODD = """
    null true "" "x" [] {} 0 -1 -1.5 1e308 1e-320 1e400 Infinity -Infinity NaN 0.5 99999999999999999999
    18446744073709551616 [null] [[]] [NaN] {"a":1} "\\u001b[31m" "\\ud800" "\\u0000" "1" "\\r\\n"
""".split()
_ODD += ["9" * 5000, "-" + "9" * 400, "[" * 2000 + "]" * 2000, "1" + "0" * 308, json.dumps("x" * 5000)]

RATES = {"to_host": 20.0, "from_host": 21.0, "both_ways": 15.0}
CUSTOM_COSTS = {
    "version": 3,
    "forward": 1.0,
    "input_grad": 1.1,
    "weight_grad": 0.75,
    "latency": 0.05,
    "weight_share": 0.4,
    "copy_time": 0.7,
    "one_way": True,
}
MODEL_FLAGS = (
    "--num-layers 8 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --vocab-size 5000 --swiglu "
    "--num-experts 4 --moe-layer-freq ([0]*2+[1]*6)"
)


def good(folder: Path) -> dict[str, Path]:
    """A good file of each sort, by its sort: as the program writes them, or as its users do."""
    texts = {
        "schedule.csv": to_csv(plan(Request("v-half", 4, 8))),
        "device-profile.json": json.dumps(profiled(8, copy_gbps=RATES)),
        "job-profile.json": job_profile_json.to_text(profile(v_shape(4), *V)),
        "recorded.json": recorded_run.to_text(
            made(Costs(LayerTimes(1.5, 1.25, 0.75), link=Link(0.5, ((0, 1, 0.75),))))
        ),
        "custom-costs.json": json.dumps(CUSTOM_COSTS),
        "model.sh": MODEL_FLAGS,
        "conversation.jsonl": '{"text": "some words"}\n' * 3,
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    return {name: folder / name for name in texts}


def odd_inputs(folder: Path) -> list[str]:
    """Paths of files that are none, or hold what is none: whatever sort is read."""
    csv = to_csv(plan(Request("v-half", 4, 8)))
    texts = {
        "empty": "",
        "one-row.csv": "0F0,0B0\n",
        "good.csv": csv,
        "half.csv": csv[: len(csv) // 2],
        "other-size.csv": to_csv(plan(Request("v-half", 3, 5))),
        "doubled.csv": csv.replace(",3F2,", ",3F2,3F2,"),
        "stage.csv": "0F0,0B0\n99999999999F0,1B0\n",
        "long-line.csv": "0F0," * 100_000,
        "many-rows.csv": "0F0,0B0\n" * 20_000,
        "long-stage.csv": "9" * 5000 + "F0,0B0\n",
        "escape.csv": csv.replace("3F2", "\x1b[31m3F2\x07"),
        "carriage.csv": csv.replace("\n", "\r"),
        "null-byte.csv": csv.replace("3F2", "3F\x002"),
        "digits.csv": csv.replace("3F2", "³F٢"),
        "deep.json": "[" * 100_000,
        "long-number.json": '{"version": ' + "9" * 5000 + "}",
        "large-number.json": _profile("1" + "0" * 400),
        "infinity.json": _profile("Infinity"),
        "nan.json": _profile("NaN"),
        "negative.json": _profile("-1"),
        "tiny.json": _profile("1e-300"),
        "good.json": _profile("20"),
        "list.json": "[1, 2, 3]",
        "word.json": '"version"',
        "null.json": "null",
        "number.json": "1",
        "version.json": '{"version": "\\u001b[31m"}',
        "code.sh": MODEL_FLAGS.replace("([0]*2+[1]*6)", "__import__('os')"),
        "\x1b[31mred\x1b[0m": "\x1b]0;title\x07",
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "bytes").write_bytes(bytes(range(256)))
    (folder / "utf-16.csv").write_bytes(csv.encode("utf-16"))
    with (folder / "large").open("wb") as file:
        file.truncate(2**32)  # a hole, not a full disk
    (folder / "locked").write_text(csv)
    (folder / "locked").chmod(0)
    os.mkfifo(folder / "pipe")
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "dangling").symlink_to(folder / "nowhere")
    (folder / "zero").symlink_to("/dev/zero")
    odd = "bytes", "large", "locked", "pipe", "loop", "dangling", "zero", "empty"
    linked = [f"{name}.{ending}" for name in odd for ending in ("csv", "json")]
    for name in linked:
        (folder / name).symlink_to(folder / name.partition(".")[0])
    named = [
        *texts,
        *linked,
        "bytes",
        "utf-16.csv",
        "large",
        "locked",
        "pipe",
        "loop",
        "dangling",
        "none",
        "good.csv/none",
    ]
    found = [str(folder / name) for name in (*named, "\ud800.json", "\ud800", "\udcff", "none\x1b[31m")]
    devices = ["/dev/zero", "/dev/null", "/dev/stdin", "/dev/full", "/dev/tty", "/proc/self/mem", "/proc/self/fd/0"]
    return [*found, str(folder), "", "\n", "-", "~", "/", *devices]


def odd_outputs(folder: Path) -> list[str]:
    """Paths to write to, most of which nobody can write."""
    os.mkfifo(folder / "out-pipe")
    (folder / "out-loop").symlink_to(folder / "out-loop")
    (folder / "out-locked").mkdir(mode=0o500)
    (folder / "out-file").write_text("")
    names = ["out", "none/out", "out-pipe", "out-loop", "out-locked/out", "out-file/out", "x" * 300, "\ud800"]
    names.append("out\x1b[31m")
    forms = ["out.svg", "out.html", "out.csv", "out.json", "out.md", "out.txt", "out.trace"]
    others = [str(folder), "", "\n", "-", "/", "/dev/full", "/dev/null"]
    return [*(str(folder / name) for name in (*names, *forms)), *others]


def mutations(path: Path, count: int) -> list[Path]:
    """Files beside the good one in ``path``, each wrong in one place, some ``count``: always the same."""
    text = path.read_text()
    made = list(_cut(text))
    if path.suffix == ".json":
        made += _mutated(json.loads(text), count)
    else:
        made += _words_changed(text, count)
    found = []
    for number, each in enumerate(made):
        found.append(path.with_name(f"{path.stem}-{number}{path.suffix}"))
        found[-1].write_text(each, errors="surrogatepass")
    return found


def _profile(ms: str) -> str:
    """A cost profile in which input gradients take so long."""
    return json.dumps(profiled(8)).replace('"I": {"median": 96', f'"I": {{"median": {ms}')


def _cut(text: str) -> Iterator[str]:
    """``text`` not whole, or with more than it should have."""
    yield from (text[: len(text) // 3], text[:-2], text + text, f"\ufeff{text}", text.replace(" ", "\x00"))
    yield from (f"\x1b[2J{text}", text.replace("1", "\u0661"), text.upper())


def _mutated(data: Any, count: int) -> Iterator[str]:
    """JSON of ``data`` with one value left out, or another in its place."""
    draw = random.Random(17)
    places = list(_places(data))
    by_shape = {tuple("" if isinstance(step, int) else step for step in place): place for place in reversed(places)}
    for place in by_shape.values():  # one of each shape, left out
        yield json.dumps(_changed(data, place, None, leave_out=True))
    shapes = list(by_shape.values())
    for number in range(count):
        place = shapes[number % len(shapes)]
        yield json.dumps(_changed(data, place, "@")).replace('"@"', draw.choice(_ODD))


def _places(data: Any, place: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for step, value in items:
        yield (*place, step)
        yield from _places(value, (*place, step))


def _changed(data: Any, place: tuple[str | int, ...], value: Any, leave_out: bool = False) -> Any:
    found = copy.deepcopy(data)
    at = found
    for step in place[:-1]:
        at = at[step]
    if leave_out:
        del at[place[-1]]
    else:
        at[place[-1]] = value
    return found


def _words_changed(text: str, count: int) -> Iterator[str]:
    """``text`` with one word of it, or one cell, left out or another."""
    odd = [
        "",
        "0",
        "-1",
        "nan",
        "1e308",
        "9" * 30,
        "9" * 5000,
        "2**31",
        "([1]*10**9)",
        "\x1b[31m",
        "'",
        "é",
        "0F0",
        "x",
    ]
    separator = "," if "," in text else " "
    words, draw = text.split(separator), random.Random(17)
    for number in range(count):
        at = draw.randrange(len(words))
        yield separator.join([*words[:at], odd[number % len(odd)], *words[at + 1 :]])
