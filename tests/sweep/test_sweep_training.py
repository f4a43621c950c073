"""Training's flags, ours and those of Megatron's that our checks read, with values that nobody can mean.

All of them before Megatron is imported, as any job reads them first; a part of them in dry runs too.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from megatron.schedules.estimate import megatron_flags
from megatron.schedules.integration.flags.declared import STOCK, add_arguments
from megatron.schedules.job.flags import SEARCH_VARIABLE, STALL_VARIABLE
from tests.integration.results import MODEL, UNTIED
from tests.sweep import files
from tests.sweep.calls import Flag, of_argparse
from tests.sweep.judged import faults
from tests.sweep.values import Kind, short, values
from tests.sweep.worker import Call, Calls

pytestmark = pytest.mark.nightly

PROGRAM = "pretrain_gpt.py: error: "
JOB = [*MODEL, *UNTIED, "--train-iters", "10", "--global-batch-size", "8", "--pipeline-model-parallel-size", "4"]
DRY = "--pipeline-dry-run"
V_HALF = ["--pipeline-schedule", "v-half"]
ADAPTIVE = "--pipeline-schedule adaptive --pipeline-memory-limit 0.7".split()
# What a flag goes with; without it, whatever it says is refused for that.
COMPANY = {
    "--pipeline-memory-limit": ADAPTIVE,
    "--pipeline-save-memory": [*ADAPTIVE, "--pipeline-costs", "4,4,3"],
    "--pipeline-plan-lengths": ["--sft"],
}
# Without a checkpoint Megatron ends in a traceback of its own.
ASSERTED = "--use-checkpoint-args"
# One flag of Megatron's after the other has the same values. Of all calls, each so-manieth is made by default, so that
# neighbouring flags get different values.
SAMPLE = 13
# These launch a job, or say who is who in it.
VARIABLES = ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS", "LOCAL_RANK", "MEGATRON_SCHEDULES_CACHE")
LAUNCHERS = {**dict.fromkeys(VARIABLES[:-1]), SEARCH_VARIABLE: "0.01"}
ODD_VARIABLES = [
    "",
    " ",
    "²",
    "٣",
    "-1",
    "0",
    "3",
    "nan",
    "1e3",
    "9" * 30,
    "9" * 5000,
    "x",
    "\x1b[31m",
    "4\n",
    "0x4",
    "1_0",
]


def ours() -> list[Flag]:
    return of_argparse(add_arguments(argparse.ArgumentParser(add_help=False)))


def stock() -> list[Flag]:
    parser = argparse.ArgumentParser(add_help=False)
    megatron_flags.declare(parser, STOCK, megatron_flags.NAMED_OTHERWISE)
    return of_argparse(parser)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trained")


@pytest.fixture(scope="module")
def places(folder: Path) -> tuple[list[str], list[str]]:
    """Paths to read from, and to write to."""
    good = files.good(folder)
    read = [
        str(good[name]) for name in ("schedule.csv", "device-profile.json", "job-profile.json", "custom-costs.json")
    ]
    return [*read, *files.odd_inputs(folder)], files.odd_outputs(folder)


def odd(flag: Flag, places: tuple[list[str], list[str]], every: int = 1) -> Sequence[list[str]]:
    """What stands after ``flag``: nothing, or a hostile value."""
    if flag.is_switch:
        return [[]]
    found = values(flag.kinds, flag.choices, *places, every)
    # Behind a flag that may stand alone argparse takes these for flags themselves.
    return [[], *([each] for each in found if not (flag.name == DRY and each in ("--", "-v", "-4x80GiB")))]


def calls_of(flags: list[Flag], places: tuple[list[str], list[str]], every: int) -> Iterator[Call]:
    for flag in flags:
        company = COMPANY.get(flag.name, V_HALF)
        names = [flag.name, *(word for word in company if word.startswith("--"))]
        if flag.name == DRY:
            names.append("--global-batch-size")  # which so many GPUs may not divide
        for value in odd(flag, places, every):
            yield Call([*JOB, DRY, *V_HALF, *company, flag.name, *value], names, LAUNCHERS)


def before_megatron(calls: list[Call], folder: Path) -> str:
    return "\n".join(faults(Calls("before_megatron", folder).ended(calls), PROGRAM))


def test_our_flags_are_refused_in_one_line_before_megatron_is_imported(places, folder: Path, pytestconfig):
    every = 1 if pytestconfig.getoption("--nightly") else 4
    said = before_megatron(list(calls_of(ours(), places, every)), folder)
    assert not said, said


def test_our_flags_without_what_they_go_with_are_refused_in_one_line(places, folder: Path):
    calls = []
    for flag in ours():
        for value in odd(flag, places)[:12]:
            calls.append(Call([*JOB, flag.name, *value], [flag.name], LAUNCHERS))
            names = [flag.name, "--pipeline-memory-limit", DRY]
            calls.append(Call([*JOB, *V_HALF, flag.name, *value], names, {**LAUNCHERS, "WORLD_SIZE": "4"}))
            calls.append(Call([*JOB, DRY, *ADAPTIVE, flag.name, *value], [flag.name], LAUNCHERS))
    said = before_megatron(calls, folder)
    assert not said, said


def test_sizes_of_megatrons_are_refused_in_one_line_before_it_is_imported(folder: Path, pytestconfig: pytest.Config):
    calls = [call for call in calls_of(stock(), ([], []), 1) if call.arguments]
    said = before_megatron(calls if pytestconfig.getoption("--nightly") else calls[::SAMPLE], folder)
    assert not said, said


@pytest.mark.parametrize("name", [*VARIABLES, SEARCH_VARIABLE, STALL_VARIABLE])
def test_an_odd_environment_is_refused_in_one_line_or_left_to_megatron(name: str, folder: Path):
    calls = []
    for value in ODD_VARIABLES:
        if name in ("RANK", "SLURM_PROCID") and value.strip().isdecimal() and value.strip("0\n"):
            continue  # another process than the first leaves the words to that one
        if name == SEARCH_VARIABLE and not short(value):
            continue  # a long search is what was asked for
        around = {**LAUNCHERS, name: value}
        calls.append(Call([*JOB, *V_HALF], [], around))
        calls.append(Call([*JOB, *V_HALF, DRY], [], around))
        calls.append(Call([*JOB, *ADAPTIVE, DRY, "x1GiB"], [], around))
    said = before_megatron(calls, folder)
    assert not said, said


def test_dry_runs_end_with_a_plan_or_in_one_line(places, folder: Path, pytestconfig: pytest.Config):
    """Those of flags that the checks before Megatron let pass, or leave to it."""
    every = 1 if pytestconfig.getoption("--nightly") else 48
    flags = [flag for flag in (*ours(), *stock()) if flag.name != ASSERTED]
    calls = list(calls_of(flags, places, every))
    early = Calls("before_megatron", folder).ended(calls if every == 1 else calls[::SAMPLE])
    passed = [call for call, ending in early if ending.status == 0]
    if every > 1:
        firsts = {call.flags[0]: call for call in reversed(passed)}
        passed = [*firsts.values(), *passed[::every]]
    ended = Calls("training", folder).ended(passed)
    found = faults(ended, PROGRAM, good=(0, 3))
    said = "\n".join(found)
    assert not said, said


@pytest.mark.pure
def test_the_kinds_of_each_of_our_flags_are_told_by_its_declaration():
    assert {flag.name for flag in ours() if not flag.kinds} == set()


@pytest.mark.pure
def test_a_number_is_what_a_size_of_megatrons_is():
    kinds = {flag.name: flag.kinds for flag in stock()}
    assert kinds["--hidden-size"] == {Kind.NUMBER}
