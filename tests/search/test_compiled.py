"""The machine code of the search: kept for one user, believed only as it was written, compiled again otherwise."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import megatron.schedules
from megatron.schedules.search.compiled import compiled_climb, kept_code, records, work_for
from megatron.schedules.search.forward_backward import Both
from megatron.schedules.search.list_scheduling import Instance
from megatron.schedules.search.moves import ALIKE, NONE, Move, Orders, Rules
from megatron.schedules.utils.cache_directory import USER_VARIABLE, warn_once

anew = compiled_climb.__wrapped__


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache directory: not there yet."""
    monkeypatch.setenv(USER_VARIABLE, str(tmp_path / "kept"))
    return tmp_path / "kept" / "megatron-schedules"


def files(kept: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in (kept / "compiled").rglob("*.nb?")}


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


def small() -> Callable[..., int]:
    """A function that is compiled in no time, kept as the large ones are."""
    import numba

    return kept_code(_next, numba.int64(numba.int64))


@pytest.mark.parametrize(
    ("suffix", "damage"), [(".nbi", "empty"), (".nbi", "cut short"), (".nbc", "gone"), (".nbc", "changed")]
)
def test_what_is_damaged_is_compiled_again_and_the_log_says_so_once(
    kept: Path, suffix: str, damage: str, caplog: pytest.LogCaptureFixture
):
    small()
    (path,) = (path for path in files(kept) if path.suffix == suffix)
    whole = path.read_bytes()
    changed = whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:]
    left = {"empty": b"", "cut short": whole[: len(whole) // 2], "changed": changed}
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(left[damage])
    for _ in range(2):
        assert small()(3) == 4
    (said,) = caplog.messages
    assert said.endswith("holds machine code other than was put there, or not all of it: compiled anew")


def test_without_a_folder_to_write_to_it_is_compiled_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(USER_VARIABLE, str(tmp_path / "file" / "kept"))
    assert small()(3) == 4


class _Forged:
    """A pickle that makes a file when it is read."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self._path),)


def forge(index: Path, harm: Path) -> None:
    """Put a forged pickle in the place of numba's index, and right checksums beside it."""
    index.write_bytes(pickle.dumps(_Forged(harm)))
    (sums,) = (folder / "sums.json" for folder in index.parents if (folder / "sums.json").exists())
    others = (path for path in sums.parent.rglob("*") if path.is_file() and path != sums)
    found = {str(path.relative_to(sums.parent)): hashlib.sha256(path.read_bytes()).hexdigest() for path in others}
    sums.write_text(json.dumps(dict(sorted(found.items()))))


def index_of(kept: Path) -> Path:
    (index,) = (path for path in files(kept) if path.suffix == ".nbi")
    return index


def test_a_forged_pickle_of_this_user_would_be_read(kept: Path, tmp_path: Path):
    """So the tests below forge well."""
    small()
    forge(index_of(kept), tmp_path / "harm")
    with suppress(Exception):
        small()
    assert (tmp_path / "harm").exists()


@pytest.mark.parametrize("part", ["file", "numba's directory", "function", "version", "compiled", "megatron-schedules"])
@pytest.mark.parametrize("how", ["group", "others", "foreign", "link"])
def test_a_pickle_that_others_can_have_written_is_never_read(
    kept: Path, tmp_path: Path, part: str, how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    warn_once.cache_clear()
    small()
    index = index_of(kept)
    forge(index, tmp_path / "harm")
    levels = ["file", "numba's directory", "function", "version", "compiled", "megatron-schedules"]
    path = (index, *index.parents)[levels.index(part)]
    if how == "link":
        path.symlink_to(path.rename(tmp_path / "elsewhere"))
    elif how != "foreign":
        path.chmod(path.stat().st_mode | {"group": 0o020, "others": 0o002}[how])
    elif os.geteuid() == 0:
        os.chown(path, 65534, -1)
    else:
        pytest.skip("only root can give a file away")
    assert small()(3) == 4
    assert not (tmp_path / "harm").exists()
    assert len(caplog.messages) == 1


def test_compiled_code_is_private_whatever_the_umask(kept: Path, caplog: pytest.LogCaptureFixture):
    usual = os.umask(0)
    try:
        small()
    finally:
        os.umask(usual)
    assert not any(path.stat().st_mode & 0o077 for path in (kept, *kept.rglob("*")))
    before = files(kept)
    assert small()(3) == 4
    assert files(kept) == before
    assert not caplog.messages


def test_compiled_code_is_not_kept_with_plans(kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Directories for plans are shared, and reading compiled code runs it."""
    monkeypatch.setenv("MEGATRON_SCHEDULES_CACHE", str(tmp_path / "plans"))
    small()
    assert files(kept)
    assert not (tmp_path / "plans").exists()
