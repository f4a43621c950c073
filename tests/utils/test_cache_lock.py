"""Locks: nobody waits for ever, no file is harmed, and none is left."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.schedules.utils import cache_lock
from megatron.schedules.utils.cache_directory import PLANS_VARIABLE, Directory, plans, warn_once
from megatron.schedules.utils.cache_lock import locked

ROOT = Path(__file__).parents[2]


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Directory]:
    warn_once.cache_clear()
    monkeypatch.setenv(PLANS_VARIABLE, str(tmp_path / "plans"))
    with plans() as opened:
        assert opened is not None
        yield opened


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits gives up soon."""
    monkeypatch.setattr(cache_lock, "_PATIENCE_S", 0.5)


HOLDING = """
import time
from megatron.schedules.utils import cache_lock
from megatron.schedules.utils.cache_directory import plans
cache_lock._BEAT_EVERY_S = 0.02
with plans() as directory, cache_lock.locked(directory, "file") as lock:
    print("held", flush=True)
    {work}
"""


@pytest.fixture
def holder(directory: Directory) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock of ``file``."""
    command = [sys.executable, "-c", HOLDING.format(work="time.sleep(600)")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_no_lock_is_left(directory: Directory):
    with locked(directory, "file") as lock:
        assert lock is not None
        assert list(directory.path.iterdir()) == [directory.path / "file.lock"]
    assert not list(directory.path.iterdir())


def test_a_link_in_the_place_of_a_lock_is_not_followed(
    directory: Directory, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    target = tmp_path / "precious"
    target.write_text("all of it")
    (directory.path / "file.lock").symlink_to(target)
    with locked(directory, "file") as lock:
        assert lock is None
    assert target.read_text() == "all of it"
    (said,) = caplog.messages
    assert said.startswith(f"pipeline schedule: {directory.path}/file.lock is not used: it is a symbolic link")


@pytest.mark.usefixtures("impatient")
def test_a_stopped_holder_is_waited_for_no_longer_than_said_and_is_named(
    directory: Directory, holder: subprocess.Popen[str], caplog: pytest.LogCaptureFixture
):
    holder.send_signal(signal.SIGSTOP)
    with locked(directory, "file") as lock:
        assert lock is None
    (said,) = caplog.messages
    assert re.search(rf"file\.lock is locked by process {holder.pid} on \S+, which has shown no progress for", said)
    with locked(directory, "other") as lock:
        assert lock is not None, "a lock is of one file"


@pytest.mark.usefixtures("impatient")
def test_a_holder_that_says_nothing_but_works_is_waited_for(directory: Directory, holder: subprocess.Popen[str]):
    ended = threading.Timer(2.0, holder.terminate)
    ended.start()
    with locked(directory, "file") as lock:
        assert lock is not None, "four times as long as a stopped one"
    assert holder.wait(60) == -signal.SIGTERM


@pytest.mark.usefixtures("impatient")
def test_a_reader_that_locks_the_file_is_not_waited_for_for_ever(
    directory: Directory, caplog: pytest.LogCaptureFixture
):
    (directory.path / "file.lock").touch(0o600)
    reader = os.open(directory.path / "file.lock", os.O_RDONLY)
    fcntl.flock(reader, fcntl.LOCK_EX)
    with locked(directory, "file") as lock:
        assert lock is None
    os.close(reader)
    assert "is locked by a process that is not known" in caplog.text


def test_the_lock_of_a_holder_that_died_is_taken_over(directory: Directory, holder: subprocess.Popen[str]):
    holder.kill()
    holder.wait()
    assert (directory.path / "file.lock").exists()
    with locked(directory, "file") as lock:
        assert lock is not None
    assert not list(directory.path.iterdir())


def test_nobody_waits_once_the_file_is_there(directory: Directory, holder: subprocess.Popen[str]):
    with locked(directory, "file", until=lambda: True) as lock:
        assert lock is None


@pytest.mark.parametrize(
    "left",
    [b"", b"\xff" * 200, b"nan", b"host 1 1 nan", b"0.5", b"host 1 1 1.9999", b"\x1b[31m 1 1 0.5000"],
    ids=["empty", "bytes", "nan", "not a share", "old", "too much", "escape"],
)
@pytest.mark.usefixtures("impatient")
def test_whatever_a_lock_file_holds_nobody_is_misled(directory: Directory, left: bytes):
    path, told = directory.path / "file.lock", list[float]()
    path.write_bytes(left)
    path.chmod(0o600)
    with path.open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with locked(directory, "file", told.append) as lock:
            assert lock is None
    assert all(0 < share <= 1 for share in told)


def test_of_many_holders_there_is_one_at_a_time(directory: Directory):
    """Though each removes the file that the others wait on."""
    inside, most, held = 0, 0, 0
    counting = threading.Lock()

    def hold() -> None:
        nonlocal inside, most, held
        for _ in range(3):
            with locked(directory, "file") as lock:
                with counting:
                    inside += 1
                    most, held = max(most, inside), held + (lock is not None)
                with counting:
                    inside -= 1

    threads = [threading.Thread(target=hold) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert (most, held) == (1, 12)
    assert not list(directory.path.iterdir())
