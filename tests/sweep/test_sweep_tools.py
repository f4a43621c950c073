"""Programs that people call, with values that nobody can mean: each call ends soon, well or in one line."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.sweep import files
from tests.sweep.calls import Flag, of_argparse, of_click, parser_of
from tests.sweep.judged import faults
from tests.sweep.programs import click_command
from tests.sweep.values import values
from tests.sweep.worker import ROOT, Call, Calls

pytestmark = pytest.mark.nightly

# Programs that people call, each with a call that works and is soon over. The others are parts of these.
GRID = "--model 9.6B --gpus 8 --batch-size 8 --method 1F1B --jobs 1"
BASES: dict[str, list[str]] = {
    "tools.collect_sweep": ["sweep"],
    "tools.demo_corpus": ["--output", "corpus.jsonl", "--megabytes", "0.01"],
    "tools.drift": ["engine", "--record", "."],
    "benchmarks.emulate_run": "--output run --pipeline-size 2 --microbatches 2 --unit-ms 0.1".split(),
    "tools.grid_search": GRID.split(),
    "tools.preprocess_data": ["--input", "conversation.jsonl", "--output-prefix", "corpus"],
    "tools.profile_passes": "--output profile.json --num-layers 4 --hidden-size 32 --num-attention-heads 4 "
    "--seq-length 16 --micro-batch-size 1".split(),
}
# These start processes that work for a second or two in each call that is good: of their values, one of so many.
SLOW = {"benchmarks.emulate_run": 32, "tools.grid_search": 24}
# What goes wrong together is told of any of these.
RELATED = {
    "--slow": ["--costs"],
    "--sequence-length": ["passes and P2P latency may differ"],
    "--json-keys": ["--output"],
}
# These do as many seconds of work as they are asked for: they are given with what is refused before any work.
LONG = {"--save-memory", "--vocabulary-parallel", "--validate", "--top"}
REFUSED = ["--gpus", "1"]


def flags_of(tool: str) -> list[Flag]:
    module = importlib.import_module(tool)
    command = click_command(module)
    return of_click(command) if command is not None else of_argparse(parser_of(module.main))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tools")
    files.good(folder)
    (folder / "sweep").mkdir()
    (folder / "engine" / "transformer_engine").mkdir(parents=True)
    (folder / "sweep" / "candidates.csv").write_text("method,flags\n1F1B,--x 1\n")
    return folder


@pytest.fixture(scope="module")
def places(folder: Path) -> tuple[list[str], list[str]]:
    return files.odd_inputs(folder), files.odd_outputs(folder)


def calls_of(tool: str, places: tuple[list[str], list[str]], every: int) -> Sequence[Call]:
    calls = [Call(BASES[tool]), Call([*BASES[tool], "--no-such-flag"], ["--no-such-flag"]), Call([])]
    for flag in flags_of(tool):
        start = BASES[tool] if flag.name else []
        names = [flag.name, *RELATED.get(flag.name, [])] if flag.name else []
        if flag.name in LONG:
            start, names = [*start, *REFUSED], [*names, *REFUSED[:1]]
        named = [flag.name] if flag.name else []
        calls.append(Call([*start, *named], names))
        if not flag.is_switch:
            odd = values(flag.kinds, flag.choices, *places)
            calls += [Call([*start, *named, each], names) for each in odd[:: every if len(odd) > 30 else 1]]
    return calls


@pytest.mark.pure
def test_every_program_of_tools_is_swept():
    programs = {
        f"tools.{path.stem}"
        for path in (ROOT / "tools").glob("*.py")
        if not path.stem.startswith("_") and "__main__" in path.read_text()
    }
    assert {*programs, "benchmarks.emulate_run"} == set(BASES)


@pytest.mark.parametrize("tool", BASES)
def test_one_odd_flag_ends_soon_and_a_refusal_is_one_line_that_names_it(
    tool: str, places: tuple[list[str], list[str]], folder: Path, pytestconfig: pytest.Config
):
    every = 1 if pytestconfig.getoption("--nightly") else SLOW.get(tool, 8)
    calls = calls_of(tool, places, every)
    said = "\n".join(faults(Calls(tool, folder).ended(calls), tool.rpartition(".")[2]))
    assert not said, said
