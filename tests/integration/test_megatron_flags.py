"""Each flag of Megatron's own parser under a schedule: all that is logged, and the weights, are those of stock's.

``megatron_flags.toml`` has a line for each. What is random, or compared within rounding, has tests of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest
import torch

from tests import tolerances
from tests.integration.equal_logs import differences
from tests.integration.flag_table import Group, Line, groups
from tests.integration.results import MODEL, UNTIED, Logged
from tests.integration.server import Megatron
from tests.support.te_python import CAPABILITY_VARIABLE
from tools import preprocess_data

JOB = [*MODEL, *UNTIED, *"--num-layers 4 --train-iters 2 --global-batch-size 4".split()]
JOB += "--pipeline-model-parallel-size 2 --log-params-norm --log-num-zeros-in-grad --clip-grad 1000".split()
V_HALF = ["--pipeline-schedule", "v-half"]
BYTES = "--vocab-size 257 --make-vocab-size-divisible-by 1".split()
NOT_LOCAL = "--transformer-impl --no-gradient-accumulation-fusion"


@pytest.mark.job
def test_every_flag_of_megatron_has_one_line(megatron: Megatron) -> None:
    """Flags that the parser takes for the same are one."""
    parser = megatron("stock_flags")
    listed = [line.flag for group in groups() for line in group.lines]
    assert len(listed) == len(set(listed)), "a flag has two lines"
    assert [flag for flag in listed if flag not in parser] == [], "Megatron has no such flags"
    told = [parser[flag] for flag in listed]
    assert [flag for flag, read in parser.items() if read not in told] == [], "flags without a line"
    needed = {word for group in groups() for line in group.lines for word in (*group.common, *line.needs)}
    assert {word for word in needed if word.startswith("--")} <= parser.keys()


def _cases(*kinds: str) -> Iterable[object]:
    for group in groups(*kinds):
        for name in group.jobs:
            yield pytest.param(group, name, id=f"{group.what}: {name}" if name != group.what else name)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The prefix of a data set of many short documents."""
    folder = tmp_path_factory.mktemp("text")
    texts = [folder / f"text{number}" for number in range(60)]
    for number, text in enumerate(texts):
        text.write_text(f"document {number}" * (1 + number % 4))
    files = ["--output-prefix", str(folder / "all"), "--input", *map(str, texts)]
    assert preprocess_data.main(["--append-eod", *files]) == 0
    return str(folder / "all_text_document")


@pytest.fixture(scope="module")
def checkpoint(megatron: Megatron, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What stock's schedule saves after an iteration."""
    folder = tmp_path_factory.mktemp("stock")
    megatron("logged", 2, [*JOB, "--train-iters", "1", "--save", str(folder), "--save-interval", "1"])
    return str(folder)


@pytest.fixture(scope="module")
def cache(megatron: Megatron, data: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The indices that a job makes of data sets for training, validation and test."""
    folder = str(tmp_path_factory.mktemp("indices"))
    parts = [word for part in ("train", "valid", "test") for word in (f"--{part}-data-path", data)]
    megatron("logged", 2, [*_without(JOB, ["--mock-data"]), *BYTES, *parts, "--data-cache-path", folder])
    return folder


@pytest.fixture
def flags_in(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Group, list[str]], list[str]]:
    """Flags of a job of its own, with folders and files for those that name some."""
    jobs = iter(range(1000))

    def filled(group: Group, tried: list[str]) -> list[str]:
        folder = tmp_path / str(next(jobs))
        folder.mkdir()
        words = [
            *_without(JOB, f"{group.without} {NOT_LOCAL if group.te else ''}".split()),
            *["--bf16"] * group.te,
            *tried,
        ]
        text = "\n".join(words).replace("{folder}", str(folder))
        for name in ("data", "checkpoint", "cache"):
            if "{" + name + "}" in text:
                text = text.replace("{" + name + "}", request.getfixturevalue(name))
        if "{listed}" in text:
            text = text.replace("{listed}", _listed(folder, request.getfixturevalue("data")))
        return text.split("\n")

    return filled


def _listed(folder: Path, data: str) -> str:
    """A folder with files that name the data set."""
    (folder / "list.txt").write_text(data)
    (folder / "splits.json").write_text(json.dumps({name: [data] for name in ("train", "valid", "test")}))
    (folder / "counts.json").write_text(json.dumps({data: [60, 61]}))
    return str(folder)


def _without(flags: list[str], left_out: list[str]) -> list[str]:
    kept: list[str] = []
    for word in flags:
        if word.startswith("--"):
            keeping = word not in left_out
        if keeping:
            kept.append(word)
    return kept


@pytest.mark.nightly
@pytest.mark.parametrize(("group", "name"), _cases("tried"))
def test_a_flag_changes_nothing_else(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    flags_in: Callable[[Group, list[str]], list[str]],
    group: Group,
    name: str,
) -> None:
    server = request.getfixturevalue("te" if group.te else "megatron")
    if group.capability:
        monkeypatch.setenv(CAPABILITY_VARIABLE, group.capability)

    def run(which: str, tried: list[str], *schedule: str) -> Logged:
        try:
            result: Logged = server("logged", group.ranks, [*flags_in(group, tried), *schedule])
        except AssertionError as error:
            raise AssertionError(f"under {which}: {error}") from None
        return result

    def compared(tried: list[str]) -> list[str]:
        stock, ours = run("Megatron's own schedule", tried), run("v-half", tried, *V_HALF)
        # Each rank rounds the norm of fp16 weights to fp16.
        norms = torch.finfo(torch.float16).eps if "--fp16" in tried else tolerances.SAME_KERNELS
        return differences(ours, stock, norms)

    def wrong(lines: Sequence[Line]) -> str:
        """What is not the same, and with which of the flags, found by halves; nothing where all is the same."""
        try:
            found = "\n".join(compared(group.flags(*lines)))
        except AssertionError as error:
            found = str(error)
        half = len(lines) // 2
        if not found or not half:
            return found and f"{' '.join(lines[0].words)}: {found}"
        together = f"{', '.join(line.flag for line in lines)}: {found}"
        return "\n".join(filter(None, (wrong(lines[:half]) or wrong(lines[half:]), together)))

    assert not (found := wrong([line for line in group.lines if group.together or line.flag == name])), found


@pytest.mark.nightly
@pytest.mark.parametrize(("group", "name"), _cases("refused"))
def test_a_flag_is_refused_in_one_line(
    request: pytest.FixtureRequest, flags_in: Callable[[Group, list[str]], list[str]], group: Group, name: str
) -> None:
    server = request.getfixturevalue("te" if group.te else "megatron")
    ended = server("outputs", group.ranks, [*flags_in(group, group.jobs[name]), *V_HALF])
    assert {status for status, _ in ended} == {2}
    said = [line for _, text in ended for line in text.splitlines() if ": error: " in line]
    assert len(said) == 1 and group.what in said[0]
