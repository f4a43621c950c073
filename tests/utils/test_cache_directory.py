"""Cache directories: only what nobody else can have written is read, and nothing is left open to others."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.schedules.utils import cache_directory
from megatron.schedules.utils.cache_directory import (
    PLANS_VARIABLE,
    USER_VARIABLE,
    UntrustedError,
    compiled_code,
    plans,
    plans_directory,
    warn_once,
)

ROOT = Path(__file__).parents[2]
NOBODY = 65534


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory for plans, with one file; and no warning has been said."""
    warn_once.cache_clear()
    monkeypatch.setenv(PLANS_VARIABLE, str(tmp_path / "plans"))
    monkeypatch.setenv(USER_VARIABLE, str(tmp_path / "cache"))
    with plans() as made:
        assert made is not None
        made.write("file", "text")
    return tmp_path / "plans"


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ``path`` another user's, in the eyes of this process at least."""
    if os.geteuid() == 0:
        os.chown(path, NOBODY, -1)
    else:
        own = os.geteuid()
        monkeypatch.setattr(cache_directory.os, "geteuid", lambda: own + 1)


def test_directories_and_files_are_private(directory: Path):
    with compiled_code("some version") as compiled:
        assert compiled is not None
        os.close(compiled.open("lock", os.O_RDWR | os.O_CREAT))
    made = [directory, directory / "file", compiled.path, compiled.path.parent, compiled.path / "lock"]
    assert [stat.S_IMODE(path.stat().st_mode) for path in made] == [0o700, 0o600, 0o700, 0o700, 0o600]


@pytest.mark.parametrize("bits", [stat.S_IWGRP, stat.S_IWOTH, stat.S_IWOTH | stat.S_ISVTX])
def test_a_directory_that_others_can_write_to_is_refused_in_one_line(
    directory: Path, bits: int, caplog: pytest.LogCaptureFixture
):
    directory.chmod(0o700 | bits)
    for _ in range(2):
        with plans() as opened:
            assert opened is None
    (said,) = caplog.messages
    assert said.startswith(f"pipeline schedule: {directory} is not used: other users can write to it (chmod go-w")
    assert said.endswith("plans are not cached unless $MEGATRON_SCHEDULES_CACHE names another directory")
    directory.chmod(0o700)
    with plans() as opened:
        assert opened is not None and opened.read("file") == b"text"


def test_a_directory_of_another_user_is_refused_in_one_line(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    give_away(directory, monkeypatch)
    with plans() as opened:
        assert opened is None
    (said,) = caplog.messages
    assert f"{directory} is not used: it belongs to user" in said


@pytest.mark.parametrize("bits", [stat.S_IWGRP, stat.S_IWOTH])
def test_a_file_that_others_can_write_to_is_not_read(directory: Path, bits: int):
    (directory / "file").chmod(0o600 | bits)
    with plans() as opened:
        assert opened is not None
        with pytest.raises(UntrustedError, match="other users can write to it"):
            opened.read("file")


def test_a_file_of_another_user_is_not_read(directory: Path, monkeypatch: pytest.MonkeyPatch):
    with plans() as opened:
        assert opened is not None
        give_away(directory / "file", monkeypatch)
        with pytest.raises(UntrustedError, match="it belongs to user"):
            opened.read("file")


@pytest.mark.parametrize(
    ("put", "why"),
    [
        (lambda path: path.symlink_to("file"), "it is a symbolic link"),
        (os.mkfifo, "it is not a regular file"),
        (Path.mkdir, "it is not a regular file"),
    ],
    ids=["link", "pipe", "directory"],
)
def test_only_regular_files_are_read_and_nothing_waits_for_them(directory: Path, put: Callable[[Path], None], why: str):
    put(directory / "other")
    with plans() as opened:
        assert opened is not None
        with pytest.raises(UntrustedError, match=why):
            opened.read("other")


def test_a_link_to_a_directory_is_followed_only_where_the_user_named_it(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "link").symlink_to(directory)
    monkeypatch.setenv(PLANS_VARIABLE, str(tmp_path / "link"))
    with plans() as opened:
        assert opened is not None and opened.read("file") == b"text"
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "megatron-schedules").symlink_to(directory)
    monkeypatch.delenv(PLANS_VARIABLE)
    for each in (plans(), compiled_code("version")):
        with each as opened:
            assert opened is None
    assert len(caplog.messages) == 2, "one line for plans, one for compiled code"
    assert all("megatron-schedules is not used: it is a symbolic link" in said for said in caplog.messages)


@pytest.mark.parametrize("part", ["megatron-schedules", "megatron-schedules/compiled"])
def test_compiled_code_is_refused_where_a_directory_above_it_is_open_to_others(tmp_path: Path, part: str):
    with compiled_code("version") as opened:
        assert opened is not None
    (tmp_path / "cache" / part).chmod(0o777)
    with compiled_code("version") as opened:
        assert opened is None


def test_a_directory_stays_the_one_that_was_checked(directory: Path):
    """Whoever can rename the directories above it cannot put another in its place."""
    with plans() as opened:
        assert opened is not None
        directory.rename(directory.with_name("moved"))
        directory.mkdir()
        (directory / "file").write_text("forged")
        assert opened.read("file") == b"text"


def no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


@pytest.fixture
def homeless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary directory of a user who has no home, and no variable set."""
    monkeypatch.delenv(PLANS_VARIABLE)
    monkeypatch.delenv(USER_VARIABLE)
    monkeypatch.setattr(cache_directory.Path, "home", no_home)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    return tmp_path / "tmp"


def test_without_a_home_the_cache_is_a_private_temporary_directory(homeless: Path, caplog: pytest.LogCaptureFixture):
    expected = homeless / f"megatron-schedules-{os.geteuid()}"
    assert plans_directory() == expected
    for each in (plans(), compiled_code("version")):
        with each as opened:
            assert opened is not None and opened.path.is_relative_to(expected)
    assert stat.S_IMODE(expected.stat().st_mode) == 0o700
    (said,) = caplog.messages
    assert said == (
        f"pipeline schedule: there is no home directory: the cache is {expected}, unless $XDG_CACHE_HOME names another"
    )


@pytest.mark.parametrize("put", ["link", "open", "foreign", "file"])
def test_what_others_put_in_the_place_of_a_temporary_directory_is_refused(
    homeless: Path, put: str, directory: Path, monkeypatch: pytest.MonkeyPatch
):
    path = plans_directory()
    if put == "link":
        path.symlink_to(directory)
    elif put == "file":
        path.write_text("")
    else:
        path.mkdir()
        path.chmod(0o777 if put == "open" else 0o755)
        if put == "foreign":
            give_away(path, monkeypatch)
    with plans() as opened:
        assert opened is None
    with compiled_code("version") as opened:
        assert opened is None


UNKNOWN = """
import os
from megatron.schedules.planner.registry import Request, plan
from megatron.schedules.planner.plan_cache import cached_plan
request = Request("1f1b", 8, 512)
expected = plan(request)
os.setuid(4_000_001)
assert cached_plan(request) == cached_plan(request) == expected
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user whom the machine does not know")
def test_an_unknown_user_without_a_home_gets_a_plan_and_keeps_it():
    ours = {"HOME", PLANS_VARIABLE, USER_VARIABLE}
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o1777)
        command, environment["TMPDIR"] = [sys.executable, "-c", UNKNOWN], folder
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        (said,) = done.stderr.splitlines()
        assert "there is no home directory" in said
        assert list(Path(folder, "megatron-schedules-4000001").glob("*.json"))
