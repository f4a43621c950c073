"""The command line under thousands of calls that look wrong in one place: each ends soon, well or in one line."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.schedules.cli.commands import PROGRAM, _program
from megatron.schedules.job.flags import SEARCH_VARIABLE
from tests.sweep import files
from tests.sweep.calls import Flag, of_click
from tests.sweep.judged import faults
from tests.sweep.values import NUMBERS, Kind, values
from tests.sweep.worker import ROOT, Call, Calls

pytestmark = pytest.mark.nightly

SIZE = ["--pipeline-size", "4", "--microbatches", "8"]
# Calls that work, to which a case adds one flag of its own; a flag given twice counts the second time. A command that
# is not among them is called as it is.
BASES = {
    "plan": [
        ["plan", "--schedule", "v-half", *SIZE],
        ["plan", "--schedule", "adaptive", "--memory-limit", "0.6", *SIZE],
    ],
    "compare": [["compare", "--schedule", "1f1b", "--schedule", "interleaved-1f1b", *SIZE]],
    "draw": [["draw", "--schedule", "v-zb", *SIZE]],
}
SHORT: dict[str, str | None] = {SEARCH_VARIABLE: "0.01"}
MODEL = ["--model", "small.sh"]
SMALL = "--num-layers 8 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --vocab-size 5000"
# What a flag goes with: it is tried with these, too.
COMPANY = {
    "--device-memory": MODEL,
    "--layers": MODEL,
    "--vocabulary-parallel": MODEL,
    "--costs": ["--save-memory", "offload"],
}
# What a file is read by, beside the flag that each sort is for.
READERS = {
    "schedule.csv": ["--schedule", "--model"],
    "device-profile.json": ["--costs", "--recorded"],
    "custom-costs.json": ["--costs", "--recorded"],
    "job-profile.json": ["--costs", "--recorded"],
    "recorded.json": ["--recorded", "--costs"],
    "model.sh": ["--model", "--schedule"],
}
ODD_PLACES = [
    "",
    "relative",
    "/dev/null",
    "/dev/null/none",
    "/proc",
    "/nowhere",
    "x" * 300,
    "\x1b[31m",
    "a:b",
    "~",
    "\n",
]
ENVIRONMENTS: dict[str, dict[str, str | None]] = {
    "no home": {"HOME": None, "XDG_CACHE_HOME": None, "MEGATRON_SCHEDULES_CACHE": None},
    "an odd home": {"HOME": "relative\x1b[31m", "XDG_CACHE_HOME": None, "MEGATRON_SCHEDULES_CACHE": None},
    "ASCII alone": {
        "LANG": "C",
        "LC_ALL": "C",
        "PYTHONCOERCECLOCALE": "0",
        "PYTHONUTF8": "0",
        "PYTHONIOENCODING": "ascii",
    },
    "no words": {"LANG": "\x1b[31m", "TERM": "\x1b", "PATH": None},
}


def flags_of(command: str) -> dict[str, Flag]:
    return {flag.name: flag for flag in of_click(_program.commands[command])}


def bases(command: str) -> list[list[str]]:
    return BASES.get(command, [[command]])


def hostile(flag: Flag, inputs: list[str], outputs: list[str]) -> list[str]:
    return values(flag.kinds, flag.choices, inputs, outputs)


def one_flag_odd(folder: Path, every: int) -> Iterator[Call]:
    """Every flag of every command with hostile values of its kind, and without one.

    Args:
        every: one of so many values, where a command is not called as the first is.
    """
    inputs, outputs = files.odd_inputs(folder), files.odd_outputs(folder)
    (folder / "small.sh").write_text(SMALL)
    for command in _program.commands:
        flags = flags_of(command)
        for base in bases(command):
            for flag in (*flags.values(), Flag("--no-such-flag", frozenset({Kind.SWITCH}))):
                company = COMPANY.get(flag.name, [])
                names = [flag.name, *(word for word in company if word.startswith("--"))]
                yield Call([*base, flag.name], [flag.name])
                yield Call([*base, *company, flag.name], names)
                if not flag.is_switch:
                    odd = hostile(flag, inputs, outputs)[:: 1 if base is bases("plan")[0] else every]
                    yield from (Call([*base, flag.name, each], [flag.name]) for each in odd)
                    beside = odd[::every] if company else []
                    yield from (Call([*base, *company, flag.name, each], names) for each in beside)
            yield Call([*base, command], [command])
            for at in (base.index(name) for name in ("--pipeline-size", "--microbatches") if name in base):
                yield Call([*base[:at], *base[at + 2 :]], [base[at]])
    yield from (
        Call(arguments) for arguments in ([], ["--version", "x"], ["--wrong"], ["no-such-command"], [""], ["\x1b[31m"])
    )


def of_two(calls: list[Call], pairs: int) -> Iterator[Call]:
    """Two odd flags at once: whichever is named."""
    draw = random.Random(13)
    with_value = [call for call in calls if len(call.arguments) > 1 and [call.arguments[-2]] == list(call.flags)]
    for _ in range(pairs):
        one, other = draw.choice(with_value), draw.choice(with_value)
        yield Call([*one.arguments, *other.arguments[-2:]], [*one.flags, *other.flags])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("swept")


@pytest.fixture(scope="module")
def odd_calls(folder: Path, pytestconfig: pytest.Config) -> list[Call]:
    return list(one_flag_odd(folder, 1 if pytestconfig.getoption("--nightly") else 4))


def judged(calls: list[Call], folder: Path) -> str:
    return "\n".join(faults(Calls("command_line", folder, SHORT).ended(calls), PROGRAM))


@pytest.mark.pure
def test_the_kinds_of_each_flag_are_told_by_its_declaration():
    """Or it would get all values there are, of which most say nothing about it."""
    unknown = {flag.name for command in _program.commands for flag in flags_of(command).values() if not flag.kinds}
    assert unknown == set()


def test_one_odd_flag_ends_soon_and_a_refusal_is_one_line_that_names_it(odd_calls: list[Call], folder: Path):
    said = judged(odd_calls, folder)
    assert not said, said


def test_two_odd_flags_end_soon_and_a_refusal_is_one_line_that_names_one(
    odd_calls: list[Call], folder: Path, pytestconfig
):
    pairs = 400 if pytestconfig.getoption("--nightly") else 200
    said = judged(list(of_two(odd_calls, pairs)), folder)
    assert not said, said


@pytest.mark.parametrize("sort", READERS)
def test_every_file_with_one_fault_ends_soon_and_a_refusal_is_one_line(sort: str, folder: Path, pytestconfig):
    place = folder / sort
    place.mkdir()
    good = files.good(place)
    wrong = files.mutations(good[sort], 400 if pytestconfig.getoption("--nightly") else 30)
    known = {(command, flag): flags_of(command) for command in _program.commands for flag in flags_of(command)}
    calls = []
    for (command, flag), flags in known.items():
        if flag not in READERS[sort]:
            continue
        forms = [["--format", form] for form in flags["--format"].choices]
        draw = random.Random(f"{sort} {command} {flag}")
        base = [command] if flag in ("--recorded", "--schedule") else bases(command)[0]
        own = flag == READERS[sort][0]
        for path in [good[sort], *(wrong if own else wrong[:10])]:
            beside = draw.choice([[], ["--save-memory", "offload"], ["--layers", "even"], ["--vocabulary-parallel"]])
            beside = beside if flag in ("--costs", "--model") and own else []
            for form in forms if path == good[sort] else [draw.choice(forms)]:
                calls.append(Call([*base, *beside, *form, flag, str(path)], [flag, *beside[:1], *form]))
    assert calls
    said = judged(calls, folder)
    assert not said, said


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_an_odd_environment_changes_no_ending(name: str, folder: Path):
    calls = [Call(base) for command in _program.commands for base in bases(command)]
    calls += [Call([*bases("draw")[0], "--format", form]) for form in flags_of("draw")["--format"].choices]
    calls += [Call([*bases("plan")[0], "--schedule", odd], ["--schedule"]) for odd in ("é", "\ud800", "\x1b[31m")]
    ended = Calls("command_line", folder, SHORT | ENVIRONMENTS[name]).ended(calls)
    said = "\n".join(faults(ended, PROGRAM))
    assert not said, said


def test_an_odd_cache_folder_or_terminal_changes_no_ending(folder: Path):
    (folder / "is-file").write_text("")
    places = [*ODD_PLACES, str(folder / "is-file"), str(folder / "a" / "b")]
    around = [{"MEGATRON_SCHEDULES_CACHE": each} for each in places if "\x00" not in each]
    around += [{"COLUMNS": each, "LINES": each} for each in NUMBERS if "\x00" not in each and len(each) < 1000]
    calls = []
    for number, each in enumerate(around):
        size = ["--pipeline-size", "4", "--microbatches", str(2 + number)]  # that no cache has
        calls.append(Call(["plan", "--schedule", "v-half", *size], around=each))
    said = judged(calls, folder)
    assert not said, said


def started(arguments: list[str], closed: set[int]) -> tuple[int, str]:
    """The exit status of the command where streams are closed from the start, and what errors it said."""
    shell = " ".join(f"{stream}>&-" for stream in sorted(closed))
    command = f'"{sys.executable}" -m megatron.schedules "$@" {shell}'
    done = subprocess.run(["sh", "-c", command, "-", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.returncode, done.stderr


@pytest.mark.parametrize("closed", [{1}, {2}, {1, 2}], ids=["output", "errors", "both"])
@pytest.mark.parametrize(("arguments", "good"), [(BASES["plan"][0], True), (["plan", "--wrong"], False)])
def test_closed_streams_end_in_a_status_and_at_most_a_line(closed: set[int], arguments: list[str], good: bool):
    status, said = started(arguments, closed)
    assert status == (0 if good and 1 not in closed else 2)
    lines = said.splitlines()
    assert len(lines) <= 1 or (good and status == 0)
    assert not any("Traceback" in line for line in lines)
    if status == 2 and 2 not in closed:
        assert lines[0].startswith("megatron-schedules plan: ")
