"""The machine code of the search: kept in a private folder, compiled again where it is missing or damaged."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import megatron.schedules
from megatron.schedules.search import compiled, rounds
from megatron.schedules.search.compiled import compiled_climb, kept_code, records, work_for
from megatron.schedules.search.forward_backward import Both
from megatron.schedules.search.list_scheduling import Instance
from megatron.schedules.search.moves import ALIKE, NONE, Move, Orders, Rules
from megatron.schedules.search.rounds import pays_off
from megatron.schedules.utils.private_folder import PLANS_VARIABLE, warn_once
from tests.waiting import HANGS_S

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[2]
anew = compiled_climb.__wrapped__


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The private folder: not there yet. No warning has been said."""
    warn_once.cache_clear()
    monkeypatch.setenv(PLANS_VARIABLE, str(tmp_path / "kept"))
    return tmp_path / "kept"


def files(kept: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in kept.rglob("*.nb?*")}


def works(function: Callable[..., tuple[float, float, int, int]]) -> bool:
    """Whether it is the function it should be: two tasks of one rank, one after the other."""
    ints, flags, none = np.array([0, 0]), np.zeros(2, dtype=np.bool_), np.array([], dtype=np.int64)
    tasks = Instance(
        np.array([0, 2]),
        *(ints, np.ones(2), np.zeros(2), flags, flags),
        *(ints - 1, np.zeros(2), flags),
        *(ints, np.zeros(3, int), none, 1.0 * none, ints - 1, flags),
        *(1.0 * none, none, none),
    )
    both, rules = Both(tasks, tasks, np.array([1, 0])), Rules(9.0, 9.0, 3)  # type: ignore[arg-type]
    now, best = (Orders(NONE, np.array([1, 0])) for _ in range(2))
    found = function(both, np.ones(1), ALIKE, rules, records([Move(1)]), 1.0, work_for(both), now, 9.0, best, 9.0)
    return (*found, list(now.passes), list(best.passes)) == (2, 2, 3, 1, [1, 0], [1, 0])


def test_it_is_compiled_once_and_nothing_is_left_in_the_package(kept: Path):
    package = Path(megatron.schedules.__file__).parent
    before = set(package.rglob("*.nb?"))
    assert works(anew())
    written = files(kept)
    assert {path.suffix for path in written} == {".nbi", ".nbc"}
    assert works(anew())
    assert files(kept) == written
    assert set(package.rglob("*.nb?")) == before


def _next(number: int) -> int:
    return number + 1


def small() -> Any:
    """A function that is compiled in no time, kept as the large ones are."""
    import numba

    return kept_code(_next, numba.int64(numba.int64))


@pytest.mark.job
def test_what_is_not_damaged_is_loaded(kept: Path):
    small()
    before = files(kept)
    assert small().stats.cache_hits and not small().stats.cache_misses
    assert files(kept) == before


@pytest.mark.job
@pytest.mark.parametrize(
    ("suffix", "damage"), [(".nbi", "empty"), (".nbi", "cut short"), (".nbc", "cut short"), (".nbc", "gone")]
)
def test_what_is_damaged_is_compiled_again(kept: Path, suffix: str, damage: str, caplog: pytest.LogCaptureFixture):
    small()
    (path,) = (path for path in files(kept) if path.suffix == suffix)
    whole = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(whole[: len(whole) // 2] if damage == "cut short" else b"")
    for _ in range(2):
        assert small()(3) == 4
    said = [message for message in caplog.messages if "deleting it may help" in message]
    assert len(said) == len(caplog.messages) == (damage != "gone")


@pytest.mark.pure
def test_the_first_search_on_a_machine_says_that_it_compiles(
    kept: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(compiled, "kept_code", lambda *_: None)
    anew()
    (said,) = caplog.messages
    assert "compiling the search for this machine" in said
    folder = compiled._cache_folder()
    assert folder is not None and kept in folder.parents
    (folder / "search").mkdir(parents=True)
    (folder / "search" / "moves.climb-127.py312.nbi").write_text("")
    warn_once.cache_clear()
    anew()
    assert len(caplog.messages) == 1, "it has been compiled before"


@pytest.mark.pure
@pytest.mark.parametrize(
    ("passes", "is_kept", "pays"), [(1e5, True, False), (1e6, True, True), (1e6, False, False), (1e7, False, True)]
)
def test_fewer_passes_pay_for_loading_than_for_compiling(
    passes: float, is_kept: bool, pays: bool, monkeypatch: pytest.MonkeyPatch
):
    ready: list[bool] = []
    monkeypatch.setattr(rounds, "has_compiled_code", lambda: is_kept)
    monkeypatch.setattr(compiled, "is_kept", lambda: is_kept)
    monkeypatch.setattr(compiled, "compiled_climb", lambda: ready.append(True))
    assert pays_off(passes) == bool(ready) == pays


def test_another_version_of_the_code_is_compiled_anew(kept: Path, monkeypatch: pytest.MonkeyPatch):
    """The functions that it calls are not seen by numba."""
    small()
    monkeypatch.setattr(compiled, "compiled_version", lambda: "another")
    assert small().stats.cache_misses
    assert len(files(kept)) == 4


@pytest.mark.parametrize("where", ["in a file", "open to others"])
def test_without_a_private_folder_it_is_compiled_and_not_kept(
    tmp_path: Path, kept: Path, where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    if where == "in a file":
        (tmp_path / "file").write_text("")
        monkeypatch.setenv(PLANS_VARIABLE, str(tmp_path / "file" / "kept"))
    else:
        small()
        kept.chmod(0o770)
    before = files(tmp_path)
    for _ in range(2):
        assert small()(3) == 4
        assert not small().stats.cache_path
    assert files(tmp_path) == before
    assert len(caplog.messages) == 1


def test_on_a_full_disk_it_is_compiled_and_nothing_is_kept_elsewhere(
    kept: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """numba then takes the package's own folder, where code of any version may lie."""
    really = os.makedirs

    def full(path: str, *args: Any, **kwargs: Any) -> None:
        if str(kept) in str(path):
            raise OSError(28, "No space left on device")
        really(path, *args, **kwargs)

    monkeypatch.setattr(os, "makedirs", full)
    assert small()(3) == 4
    assert not files(kept) and not files(Path(__file__).parent)
    (said,) = caplog.messages
    assert "compiled code is not cached" in said


AT_ONCE = """
import sys
from tests.search.test_compiled import small
print("ready", flush=True)
sys.stdin.readline()
print(small()(3))
"""


def test_processes_that_compile_at_once_all_get_the_function(kept: Path):
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", AT_ONCE]
    processes = [subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) for _ in range(3)]
    for process in processes:
        assert process.stdout and process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin
        process.stdin.write("go\n")
        process.stdin.flush()
    assert [process.communicate(timeout=HANGS_S)[0] for process in processes] == ["4\n"] * 3
    assert small().stats.cache_hits
    assert {path.suffix for path in files(kept)} == {".nbi", ".nbc"}, "and nothing half-written"


def test_compiled_code_is_private_whatever_the_umask(kept: Path):
    usual = os.umask(0)
    try:
        small()
    finally:
        os.umask(usual)
    assert kept.stat().st_mode & 0o777 == 0o700
    assert files(kept)
