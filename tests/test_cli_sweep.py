"""The command line under thousands of calls that look wrong in one place: each ends soon, well or in one line."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.schedules.cli import main
from megatron.schedules.planning.registry import Request, plan
from megatron.schedules.planning.textforms import to_csv

ROOT = Path(__file__).parents[1]
LONGEST_S = 20.0
PAIRS = 400

# A call that works, to which a case adds one flag of its own; a flag given twice counts the second time.
COMMANDS = {
    "plan": ["plan", "--schedule", "v-half"],
    "plan adaptive": ["plan", "--schedule", "adaptive", "--memory-limit", "0.6", "--search-seconds", "0.01"],
    "compare": ["compare", "--schedule", "1f1b", "--schedule", "interleaved-1f1b"],
    "draw": ["draw", "--schedule", "v-zb"],
}
SIZE = ["--pipeline-size", "4", "--microbatches", "8"]

NUMBERS = """
    nan inf -inf -1 -0.0 0 1 2 3.5 1e3 1e18 1e100 1e101 1e308 1e400 1e-100 1e-320 0x10 1_0 12abc half 1,2 ½ ٣ -- -v ''
    00000000000000000000004 +4 4. .5 1e 9999999 2**31 18446744073709551617 None True $HOME ; | %s {} \\
""".split()
NUMBERS += ["", " ", "4 ", "\t8", "\n", "9" * 30, "9" * 400, "9" * 5000, "-" + "9" * 5000, "0." + "1" * 5000, "é" * 300]
LISTS = ["", ",", "1,,1", "1,1,1,", "1;1;1", "0,0,0,0,0,0,0,0", "1,1,1,1,1,1,1,1", ",".join(["1"] * 5000)]
LISTS += ["1,1,1", "1,1", "1,1,1,1,1", "1,1,1,1e18", "1e100,1e-100,1", "1e308,1,1", "1e-320,1,1", "0,1,1", "nan,1,1,1"]
LISTS += ["1,-2,1,1,1,1,1,1", "1e100,1,1,1,1,1,1,0", "1e308,1,1,1,1,1,1,1", "inf,1,1,1,1,1,1,1", "a,b,c,d,e,f,g,h"]
NAMES = ["", " ", "v-haff", "V-HALF", "v_half", "file", "adaptive", "1f1b", "x" * 5000, "\n", "--", "é", "none", "all"]
FORMS = ["", "svg", "text", "csv", "json", "markdown", "SVG", "pdf", "x" * 5000]


def files(folder: Path) -> list[str]:
    """Files that are none, or hold what is none."""
    good = to_csv(plan(Request("v-half", 4, 8)))
    texts = {
        "empty": "",
        "one-row.csv": "0F0,0B0\n",
        "good.csv": good,
        "half.csv": good[: len(good) // 2],
        "other-size.csv": to_csv(plan(Request("v-half", 3, 5))),
        "doubled.csv": good.replace(",3F2,", ",3F2,3F2,"),
        "stage.csv": "0F0,0B0\n99999999999F0,1B0\n",
        "long-line.csv": "0F0," * 100_000,
        "deep.json": "[" * 100_000,
        "long-number.json": '{"version": ' + "9" * 5000 + "}",
        "large-number.json": profile("1" + "0" * 400),
        "infinity.json": profile("Infinity"),
        "nan.json": profile("NaN"),
        "negative.json": profile("-1"),
        "tiny.json": profile("1e-300"),
        "good.json": profile("0.02"),
        "list.json": "[1, 2, 3]",
        "word.json": '"version"',
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "bytes").write_bytes(bytes(range(256)))
    os.mkfifo(folder / "pipe")
    (folder / "loop").symlink_to(folder / "loop")
    found = [str(folder / name) for name in (*texts, "bytes", "pipe", "loop", "none", "good.csv/none", "x" * 300)]
    return [*found, str(folder), "", "/dev/zero", "/dev/null", "/dev/stdin", "/proc/self/mem", "\n"]


def profile(seconds: str) -> str:
    """A cost profile in which an input gradient takes so long."""
    return (
        '{"version": 1, "device": "a GPU", "tensor_parallel": 1, "micro_batch_size": 1, "model": {"layers": 32, '
        '"hidden_size": 64, "heads": 4, "sequence_length": 128}, "chunk": {"layers": 2, "forward": {"median": 0.02}, '
        f'"input_grad": {{"median": {seconds}}}, "weight_grad": {{"median": 0.01}}, "activation_bytes": 4000, '
        '"weight_bytes": 3000}}'
    )


def cases(folder: Path) -> list[tuple[list[str], list[str]]]:
    """Calls, each with the flags that are odd in it."""
    named = files(folder)
    outputs = [str(folder / "out"), str(folder), str(folder / "none" / "out"), "/dev/full", "", "x" * 300]
    values: dict[str, list[str]] = {
        "--pipeline-size": NUMBERS,
        "--microbatches": NUMBERS,
        "--chunks": NUMBERS,
        "--width": [*NUMBERS, "10000000"],
        "--memory-limit": NUMBERS,
        "--search-seconds": [text for text in NUMBERS if text.strip("0123456789.eE+_") or len(text) < 3],
        "--weight-share": NUMBERS,
        "--recompute": NUMBERS,
        "--kept": NUMBERS,
        "--costs": LISTS,
        "--stage-weights": LISTS,
        "--stage-activations": LISTS,
        "--schedule": NAMES,
        "--format": FORMS,
        "--costs-file": named,
        "--schedule-file": named,
        "--output": outputs,
        "--gradients": [],
        "--vocabulary-parallel": [],
        "--no-such-flag": ["1"],
    }
    made = []
    for command, flags in COMMANDS.items():
        for flag, texts in values.items():
            made += [([*flags, *SIZE, flag, text], flag) for text in texts]
            made.append(([*flags, *SIZE, flag], flag))
        made += [(flags + SIZE[:2], "--microbatches"), (flags + SIZE[2:], "--pipeline-size")]
        made.append(([*flags, *SIZE, command], command))
    # Two odd flags at once: whichever is named.
    draw = random.Random(13)
    with_value = [case for case in made if case[0][-2] == case[1]]
    pairs = [(draw.choice(with_value), draw.choice(with_value)) for _ in range(PAIRS)]
    return [(arguments, [flag]) for arguments, flag in made] + [
        ([*one, *other[-2:]], [flag, another]) for (one, flag), (other, another) in pairs
    ]


def test_every_call_ends_soon_and_a_refusal_is_one_line_that_names_the_flag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    for arguments, flags in cases(tmp_path):
        begun = time.monotonic()
        status = main(arguments)
        took = time.monotonic() - begun
        _, err = capsys.readouterr()
        err = re.sub(r"^planning .* after \d+ s\n", "", err, flags=re.MULTILINE)  # a busy machine has time to say it
        call = " ".join(argument[:50] for argument in arguments)
        assert took < LONGEST_S, call
        if status == 0:
            assert err == "", call
            continue
        assert status == 2, call
        assert err.startswith("megatron-schedules ") and err.count("\n") == 1, f"{call}: {err}"
        assert len(err) < 1000, call
        # Whether a limit is too small depends on every other flag.
        assert any(flag in err for flag in (*flags, "--memory-limit: a memory limit")), f"{call}: {err}"


def started(arguments: list[str], closed: set[int]) -> tuple[int, str]:
    """The exit status of the command where streams are closed from the start, and what errors it said."""
    shell = " ".join(f"{stream}>&-" for stream in sorted(closed))
    command = f'"{sys.executable}" -m megatron.schedules "$@" {shell}'
    done = subprocess.run(["sh", "-c", command, "-", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.returncode, done.stderr


@pytest.mark.parametrize("closed", [{1}, {2}, {1, 2}], ids=["output", "errors", "both"])
@pytest.mark.parametrize(("arguments", "good"), [([*COMMANDS["plan"], *SIZE], True), (["plan", "--wrong"], False)])
def test_closed_streams_end_in_a_status_and_at_most_a_line(closed: set[int], arguments: list[str], good: bool):
    status, said = started(arguments, closed)
    assert status == (0 if good and 1 not in closed else 2)
    lines = said.splitlines()
    assert len(lines) <= 1 or (good and status == 0)
    assert not any("Traceback" in line for line in lines)
    if status == 2 and 2 not in closed:
        assert lines[0].startswith("megatron-schedules plan: ")
