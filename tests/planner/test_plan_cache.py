"""Plans that are kept: searched once, by one process, and never trusted where the file is not whole."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.schedules.planner import plan_cache
from megatron.schedules.planner.plan_cache import cached_plan
from megatron.schedules.planner.registry import Request, plan
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.text_forms import to_json, to_record
from megatron.schedules.utils import cache_directory, cache_lock
from megatron.schedules.utils.cache_directory import PLANS_VARIABLE, USER_VARIABLE, plans_directory
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.progress import Progress
from tests.waiting import HANGS_S

ROOT = Path(__file__).parents[2]
REQUEST = Request("adaptive", 3, 4, Costs(1, 1.1, 0.75, 0.05), memory_limit=0.7, search_seconds=0.01)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of plans: not there yet."""
    monkeypatch.setenv(PLANS_VARIABLE, str(tmp_path / "some" / "plans"))
    return tmp_path / "some" / "plans"


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """What has been planned rather than read."""
    requests = []

    def counting(request: Request, progress: Progress) -> Schedule:
        requests.append(request)
        return plan(request, progress)

    monkeypatch.setattr(plan_cache, "plan", counting)
    return requests


def test_the_same_is_searched_once(kept: Path, searched: list[Request]):
    first = cached_plan(REQUEST)
    again = cached_plan(replace(REQUEST))
    assert searched == [REQUEST]
    assert first == again == plan(REQUEST)
    assert [path.suffix for path in sorted(kept.glob("*.*"))] == [".json"], "and nothing half-written, and no lock"


@pytest.mark.parametrize(
    "other",
    [
        replace(REQUEST, microbatches=5),
        replace(REQUEST, memory_limit=0.8),
        replace(REQUEST, search_seconds=0.02),
        replace(REQUEST, chunk_choices=(1, 2)),
        replace(REQUEST, costs=Costs(1, 1.1, 0.75, 0.0500001)),
        replace(REQUEST, costs=replace(REQUEST.costs, stage_weights=(1.0,) * 12)),
    ],
    ids=["microbatches", "limit", "seconds", "chunks", "link latency", "weights"],
)
def test_something_else_is_searched_for_itself(kept: Path, searched: list[Request], other: Request):
    cached_plan(REQUEST)
    assert cached_plan(other).microbatches == other.microbatches
    assert searched == [REQUEST, other]


def test_another_version_of_the_planner_searches_anew(
    kept: Path, searched: list[Request], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "search").mkdir()
    (tmp_path / "search" / "climb.py").write_text("one")
    monkeypatch.setattr(cache_directory, "__file__", str(tmp_path / "utils" / "cache_directory.py"))
    cached_plan(REQUEST)
    cached_plan(REQUEST)
    assert len(searched) == 1
    (tmp_path / "search" / "climb.py").write_text("another")
    cached_plan(REQUEST)
    assert len(searched) == 2


@pytest.mark.parametrize(
    "left", [b"", b"{}", b"\xff\x00", b"half", None], ids=["empty", "other", "bytes", "half", "gone"]
)
def test_what_is_not_whole_is_searched_and_written_anew(kept: Path, searched: list[Request], left: bytes | None):
    schedule = cached_plan(REQUEST)
    (path,) = kept.glob("*.json")
    whole = path.read_bytes()
    if left is None:
        path.unlink()
    else:
        path.write_bytes(whole[: len(whole) // 2] if left == b"half" else left)
    assert cached_plan(REQUEST) == schedule
    assert len(searched) == 2
    assert path.read_bytes() == whole


def test_without_a_folder_to_write_to_it_plans_all_the_same(
    searched: list[Request], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(PLANS_VARIABLE, str(tmp_path / "file" / "plans"))
    assert cached_plan(REQUEST) == cached_plan(REQUEST) == plan(REQUEST)
    assert len(searched) == 2


def test_on_a_full_disk_it_plans_all_the_same(kept: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache_directory.os, "replace", full)
    assert cached_plan(REQUEST) == plan(REQUEST)
    assert not list(kept.glob("*.*"))


def test_what_cannot_be_planned_is_not_kept(kept: Path):
    for _ in range(2):
        with pytest.raises(PlanError, match="too small"):
            cached_plan(replace(REQUEST, memory_limit=0.01))
    assert not list(kept.glob("*.json"))


@pytest.mark.parametrize(
    "other",
    [replace(REQUEST, microbatches=5), replace(REQUEST, memory_limit=0.8), replace(REQUEST, ranks=4)],
    ids=["microbatches", "limit", "ranks"],
)
def test_a_plan_in_the_place_of_anothers_is_not_believed_and_the_log_says_so_once(
    kept: Path, searched: list[Request], other: Request, caplog: pytest.LogCaptureFixture
):
    cached_plan(other)
    (path,) = kept.glob("*.json")
    foreign = path.read_bytes()
    path.unlink()
    cached_plan(REQUEST)
    (path,) = kept.glob("*.json")
    path.write_bytes(foreign)
    for _ in range(2):
        assert cached_plan(REQUEST) == plan(REQUEST)
    assert searched == [other, REQUEST, REQUEST]
    (said,) = caplog.messages
    assert said.startswith(f"pipeline schedule: {path} does not hold the plan it was made for, or not all of it")
    assert said.endswith(": planned anew")


def test_a_plan_in_which_something_was_changed_is_not_believed(kept: Path, searched: list[Request]):
    schedule = cached_plan(REQUEST)
    (path,) = kept.glob("*.json")
    record = json.loads(path.read_text())
    record["order"] = json.loads(to_json(plan(replace(REQUEST, memory_limit=1.5, search_seconds=0.02))))["order"]
    path.write_text(json.dumps(record))
    assert cached_plan(REQUEST) == schedule
    assert len(searched) == 2


def test_a_large_plan_by_name_is_kept_too(kept: Path, searched: list[Request]):
    request = Request("1f1b", 8, 512)
    assert cached_plan(request) == cached_plan(request) == plan(request)
    assert searched == [request]
    assert len(list(kept.glob("*.json"))) == 1


def test_small_plans_by_name_are_not_kept(kept: Path, searched: list[Request]):
    for _ in range(2):
        cached_plan(replace(REQUEST, schedule="v-half"))
    assert len(searched) == 2
    assert not kept.exists()


AT_ONCE = """
import sys, time
from pathlib import Path
from megatron.schedules.utils import cache_directory
from megatron.schedules.planner import plan_cache
from megatron.schedules.schedule.text_forms import to_csv
from tests.planner.test_plan_cache import REQUEST

def slowly(request, progress):
    with Path(sys.argv[1]).open("a") as log:
        log.write("searched\\n")
    time.sleep(0.5)
    return plan(request, progress)

plan, plan_cache.plan = plan_cache.plan, slowly
print("ready", flush=True)
sys.stdin.readline()
print(to_csv(plan_cache.cached_plan(REQUEST)))
"""


def test_of_many_processes_one_searches_and_the_others_wait(kept: Path, tmp_path: Path):
    """As the ranks of a job do that share a folder."""
    log = tmp_path / "log"
    arguments = [sys.executable, "-c", AT_ONCE, str(log)]
    pipe = subprocess.PIPE
    ranks = [subprocess.Popen(arguments, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) for _ in range(3)]
    for rank in ranks:
        assert rank.stdout and rank.stdin
        assert rank.stdout.readline() == "ready\n"
    for rank in ranks:
        assert rank.stdin
        rank.stdin.write("go\n")
        rank.stdin.flush()
    found = [rank.communicate(timeout=HANGS_S)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0, 0]
    assert len(set(found)) == 1
    assert log.read_text() == "searched\n"


WORKING = """
import sys, time
from megatron.schedules.planner import plan_cache

def slowly(request, progress):
    for _ in range(4):
        progress(0.25)
        print("worked", flush=True)
        sys.stdin.readline()
    return plan(request)

plan, plan_cache.plan = plan_cache.plan, slowly
from tests.planner.test_plan_cache import REQUEST
plan_cache.cached_plan(REQUEST)
"""


def test_who_waits_for_anothers_plan_hears_how_far_it_is(kept: Path):
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", WORKING], cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as other:
        assert other.stdin and other.stdout
        assert other.stdout.readline() == "worked\n"
        heard: list[float] = []

        def progress(share: float) -> None:
            heard.append(share)
            assert other.stdin
            other.stdin.write("on\n")
            other.stdin.flush()

        assert cached_plan(REQUEST, progress) == plan(REQUEST)
    assert heard == [0.25] * 4


def forge(path: Path, **changes: Any) -> None:
    """Change what a kept file says, its checksum too."""
    record = json.loads(path.read_text()) | changes
    mark = record.pop("kept")
    record["kept"] = mark | {"digest": hashlib.sha256(json.dumps(record).encode()).hexdigest()}
    path.write_text(json.dumps(record))


FORGED = {
    "other sizes": to_record(plan(replace(REQUEST, microbatches=5))),
    "other ranks": to_record(plan(replace(REQUEST, ranks=4))),
    "too much memory": to_record(plan(replace(REQUEST, memory_limit=3))),
    "another placement": to_record(plan(replace(REQUEST, schedule="interleaved-1f1b"))) | {"name": "adaptive"},
    "no schedule's name": {"name": "mine"},
    "an order that cannot finish": {"order": [["0F0"]] * 3},
    "no order": {"order": 3},
    "no numbers": {"microbatches": "four"},
}


@pytest.mark.parametrize("forged", FORGED.values(), ids=FORGED)
def test_a_forged_plan_with_a_right_checksum_is_not_believed(
    kept: Path, searched: list[Request], forged: dict[str, Any], caplog: pytest.LogCaptureFixture
):
    schedule = cached_plan(REQUEST)
    (path,) = kept.glob("*.json")
    whole = path.read_bytes()
    forge(path, **forged)
    assert cached_plan(REQUEST) == schedule
    assert len(searched) == 2
    assert path.read_bytes() == whole, "written anew"
    (said,) = caplog.messages
    assert str(path) in said and said.endswith(": planned anew")


NOT_RECORDS = [b"null", b"[]", b"3", b'"kept"', b'{"kept": 1}', b"[" * 100_000, b'{"kept": {}, "a": NaN}', b"9" * 9999]


@pytest.mark.parametrize("left", NOT_RECORDS, ids=lambda left: left[:12].decode())
def test_whatever_a_kept_file_holds_the_plan_is_found(kept: Path, left: bytes):
    schedule = cached_plan(REQUEST)
    (path,) = kept.glob("*.json")
    path.write_bytes(left)
    assert cached_plan(REQUEST) == schedule


@pytest.mark.parametrize("how", ["link", "writable"])
def test_a_plan_that_others_may_have_put_there_is_replaced(
    kept: Path, searched: list[Request], tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
):
    schedule = cached_plan(REQUEST)
    (path,) = kept.glob("*.json")
    if how == "link":
        path.symlink_to(path.rename(tmp_path / "elsewhere"))
    else:
        path.chmod(0o666)
    for _ in range(2):
        assert cached_plan(REQUEST) == schedule
    assert len(searched) == 2
    assert not path.is_symlink() and path.stat().st_mode & 0o777 == 0o600
    assert len(caplog.messages) == 1


def test_in_a_directory_open_to_others_it_plans_all_the_same_and_says_so_once(
    kept: Path, searched: list[Request], caplog: pytest.LogCaptureFixture
):
    kept.mkdir(parents=True)
    kept.chmod(0o777)
    assert cached_plan(REQUEST) == cached_plan(REQUEST) == plan(REQUEST)
    assert len(searched) == 2
    assert not list(kept.iterdir())
    assert len(caplog.messages) == 1


def test_what_is_kept_is_read_where_nothing_can_be_written(
    kept: Path, searched: list[Request], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    cached_plan(REQUEST)
    before, really = sorted(kept.iterdir()), os.open

    def read_only(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, "Read-only file system")
        return really(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", read_only)
    other = replace(REQUEST, microbatches=5)
    assert cached_plan(REQUEST) == plan(REQUEST)
    assert searched == [REQUEST], "read"
    assert cached_plan(other) == plan(other)
    assert searched == [REQUEST, other], "planned, since it is not there"
    monkeypatch.undo()
    assert sorted(kept.iterdir()) == before
    assert not caplog.messages


READ_AS_ANOTHER = """
import os
from megatron.schedules.planner import plan_cache
from megatron.schedules.planner.registry import Request
expected = plan_cache.cached_plan(Request("1f1b", 8, 512))
os.setuid(65534)
plan_cache.plan = None
assert plan_cache.cached_plan(Request("1f1b", 8, 512)) == expected
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_roots_plans_are_read_by_a_user_who_cannot_write():
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        work = READ_AS_ANOTHER.replace("os.setuid", f"[os.chmod(p, 0o644) for p in os.scandir({folder!r})]; os.setuid")
        environment = os.environ | {PLANS_VARIABLE: folder}
        subprocess.run([sys.executable, "-c", work], cwd=ROOT, env=environment, check=True, timeout=120)


def test_what_is_kept_needs_no_lock(kept: Path, searched: list[Request], monkeypatch: pytest.MonkeyPatch):
    cached_plan(REQUEST)
    monkeypatch.setattr(plan_cache, "locked", None)
    assert cached_plan(REQUEST) == plan(REQUEST)
    assert searched == [REQUEST]


def test_after_a_planner_that_is_stopped_others_plan_for_themselves(
    kept: Path, searched: list[Request], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(cache_lock, "_PATIENCE_S", 0.5)
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", WORKING], cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as other:
        assert other.stdout and other.stdout.readline() == "worked\n"
        other.send_signal(signal.SIGSTOP)
        for _ in range(2):
            assert cached_plan(REQUEST) == plan(REQUEST)
        other.kill()
    (said,) = caplog.messages
    assert f"is locked by process {other.pid} on " in said
    assert searched == [REQUEST], "and what it found is kept"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({PLANS_VARIABLE: "/plans", USER_VARIABLE: "/cache"}, "/plans"),
        ({USER_VARIABLE: "/cache"}, "/cache/megatron-schedules"),
        ({}, "/home/me/.cache/megatron-schedules"),
        ({PLANS_VARIABLE: "", USER_VARIABLE: ""}, "/home/me/.cache/megatron-schedules"),
    ],
)
def test_plans_are_kept_where_the_variable_says_or_in_the_users_cache(
    environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
):
    for variable in (PLANS_VARIABLE, USER_VARIABLE):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in {"HOME": "/home/me", **environment}.items():
        monkeypatch.setenv(variable, value)
    assert plans_directory() == Path(expected)
