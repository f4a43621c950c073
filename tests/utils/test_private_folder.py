"""The private folder: only a folder that nobody else can open or change is used, and what is wrong is said once."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.schedules.utils import private_folder as module
from megatron.schedules.utils.private_folder import (
    PLANS_VARIABLE,
    USER_VARIABLE,
    plans_directory,
    private_folder,
    warn_once,
    write_whole,
)
from tests.waiting import HANGS_S

ROOT = Path(__file__).parents[2]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(params=["named", "default"])
def path(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the folder is, which is not there yet; and no warning has been said."""
    warn_once.cache_clear()
    monkeypatch.delenv(PLANS_VARIABLE)
    monkeypatch.setenv(USER_VARIABLE, str(tmp_path / "cache"))
    if request.param == "named":
        monkeypatch.setenv(PLANS_VARIABLE, str(tmp_path / "some" / "plans"))
    return plans_directory()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({PLANS_VARIABLE: "/plans", USER_VARIABLE: "/cache"}, "/plans"),
        ({USER_VARIABLE: "/cache"}, "/cache/megatron-schedules"),
        ({}, "/home/me/.cache/megatron-schedules"),
        ({PLANS_VARIABLE: "", USER_VARIABLE: ""}, "/home/me/.cache/megatron-schedules"),
    ],
)
def test_the_folder_is_where_the_variable_says_or_in_the_users_cache(
    environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
):
    for variable in (PLANS_VARIABLE, USER_VARIABLE):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in {"HOME": "/home/me", **environment}.items():
        monkeypatch.setenv(variable, value)
    assert plans_directory() == Path(expected)


def test_folder_and_files_are_private_whatever_the_umask(path: Path, caplog: pytest.LogCaptureFixture):
    usual = os.umask(0)
    try:
        assert private_folder() == path
        write_whole(path / "file", b"text")
    finally:
        os.umask(usual)
    assert (mode(path), mode(path / "file")) == (0o700, 0o600)
    assert private_folder() == path
    assert not caplog.messages


def test_a_folder_that_others_can_read_becomes_private_unless_the_user_named_it(
    path: Path, caplog: pytest.LogCaptureFixture
):
    path.mkdir(parents=True)
    path.chmod(0o755)
    if PLANS_VARIABLE in os.environ:
        for _ in range(2):
            assert private_folder() is None
        (said,) = caplog.messages
        assert said.startswith(f"pipeline schedule: {path} is not used: other users can open it (chmod 700 makes it")
        assert said.endswith(f"unless ${PLANS_VARIABLE} names a folder that belongs to you and that only you can open")
        assert mode(path) == 0o755
        path.chmod(0o700)
    assert private_folder() == path
    assert mode(path) == 0o700


def put_open(path: Path, bits: int) -> None:
    path.mkdir()
    path.chmod(0o700 | bits)


def put_link(path: Path) -> None:
    path.with_name("elsewhere").mkdir(0o700)
    path.symlink_to("elsewhere")


@pytest.mark.parametrize(
    ("put", "why"),
    [
        (lambda path: put_open(path, stat.S_IWGRP), "other users can write to it"),
        (lambda path: put_open(path, stat.S_IWOTH | stat.S_ISVTX), "other users can write to it"),
        (put_link, "it is a symbolic link"),
        (lambda path: path.write_text(""), "File exists"),
        (lambda path: path.symlink_to("nowhere"), "File exists"),
    ],
    ids=["group", "others", "link", "file", "dangling link"],
)
def test_what_others_may_have_filled_is_not_used_and_said_once(
    path: Path, put: Callable[[Path], None], why: str, caplog: pytest.LogCaptureFixture
):
    path.parent.mkdir()
    put(path)
    before = path.lstat().st_mode
    for _ in range(2):
        assert private_folder() is None
    (said,) = caplog.messages
    assert said.startswith(f"pipeline schedule: {path} is not used: {why}")
    assert path.lstat().st_mode == before


def test_a_folder_of_another_user_is_not_used(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    assert private_folder() == path
    own = os.geteuid()
    monkeypatch.setattr(module.os, "geteuid", lambda: own + 1)
    assert private_folder() is None
    (said,) = caplog.messages
    assert f"{path} is not used: it belongs to user {own}; " in said


def test_a_folder_that_cannot_be_written_to_is_not_used(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def read_only(**_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(module.tempfile, "TemporaryFile", read_only)
    for _ in range(2):
        assert private_folder() is None
    (said,) = caplog.messages
    assert f"{path} is not used: Read-only file system; " in said


def test_a_write_that_fails_leaves_the_file_as_it_was(path: Path, monkeypatch: pytest.MonkeyPatch):
    assert private_folder() == path
    write_whole(path / "file", b"text")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        write_whole(path / "file", b"other")
    assert [(file.name, file.read_bytes()) for file in path.iterdir()] == [("file", b"text")]


UNKNOWN = """
import os
from megatron.schedules.planner.plan_cache import cached_plan
from megatron.schedules.planner.registry import Request, plan
request = Request("1f1b", 8, 512)
expected = plan(request)
os.setuid(4_000_001)
assert cached_plan(request) == cached_plan(request) == expected
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user whom the machine does not know")
def test_an_unknown_user_without_a_home_gets_a_plan_and_keeps_it_private():
    ours = {"HOME", PLANS_VARIABLE, USER_VARIABLE}
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o1777)
        command, environment["TMPDIR"] = [sys.executable, "-c", UNKNOWN], folder
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=HANGS_S)
        assert done.returncode == 0, done.stderr
        (said,) = done.stderr.splitlines()
        made = Path(folder, "megatron-schedules-4000001")
        assert said == (
            f"pipeline schedule: there is no home directory: the cache is {made}, unless $XDG_CACHE_HOME names another"
        )
        assert mode(made) == 0o700
        assert list(made.glob("*.json"))
