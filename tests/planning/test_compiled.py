"""The machine code of the search: kept where plans are, believed only as it was written, compiled again otherwise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import megatron.schedules
from megatron.schedules.planning.adaptive.compiled import compiled
from megatron.schedules.planning.keeping import FOLDER_VARIABLE
from megatron.schedules.planning.list_scheduling import Instance, Policy

anew = compiled.__wrapped__


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of plans and machine code: not there yet."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "kept"))
    return tmp_path / "kept"


def files(kept: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in (kept / "compiled").rglob("*.nb?")}


def works(function: Callable[..., float]) -> bool:
    """Whether it is the function it should be: two tasks of one rank, one after the other."""
    ints, flags, none = np.array([0, 0]), np.zeros(2, dtype=np.bool_), np.array([], dtype=np.int64)
    tasks = Instance(
        np.array([0, 2]),
        *(ints, np.ones(2), np.zeros(2), flags, flags),
        *(ints - 1, np.zeros(2), flags),
        *(ints, np.zeros(3, int), none, 1.0 * none),
    )
    order, found = np.array([1, 0]), np.zeros(2, dtype=np.int64)
    return function(tasks, order, np.ones(1), Policy(1), ints.copy(), np.zeros(2), found) == 2 and list(found) == [1, 0]


def test_it_is_compiled_once_and_nothing_is_left_in_the_package(kept: Path):
    package = Path(megatron.schedules.__file__).parent
    before = set(package.rglob("*.nb?"))
    assert works(anew())
    written = files(kept)
    assert {path.suffix for path in written} == {".nbi", ".nbc"}
    assert works(anew())
    assert files(kept) == written
    assert set(package.rglob("*.nb?")) == before


@pytest.mark.parametrize(
    ("suffix", "damage"), [(".nbi", "empty"), (".nbi", "cut short"), (".nbc", "gone"), (".nbc", "changed")]
)
def test_what_is_damaged_is_compiled_again_and_the_log_says_so_once(
    kept: Path, suffix: str, damage: str, caplog: pytest.LogCaptureFixture
):
    anew()
    (path,) = (path for path in files(kept) if path.suffix == suffix)
    whole = path.read_bytes()
    left = {"empty": b"", "cut short": whole[: len(whole) // 2], "changed": whole[:-9] + b"?" + whole[-8:]}
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(left[damage])
    for _ in range(2):
        assert works(anew())
    (said,) = caplog.messages
    assert said.endswith("holds machine code other than was put there, or not all of it: compiled anew")


def test_without_a_folder_to_write_to_it_is_compiled_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "file" / "kept"))
    assert works(anew())
