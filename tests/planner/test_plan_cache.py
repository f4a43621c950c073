"""Plans that are kept: searched once, read back for the same request alone, and made anew where a file is damaged."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.uneven_layers import uneven
from megatron.schedules.estimate.models import MODELS
from megatron.schedules.estimate.times import loads
from megatron.schedules.planner import plan_cache
from megatron.schedules.planner.plan_cache import cached_partition, cached_plan, cached_saving
from megatron.schedules.planner.registry import Request, plan
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.text_forms import to_record
from megatron.schedules.utils import private_folder
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.private_folder import PLANS_VARIABLE
from megatron.schedules.utils.progress import Progress
from tests.waiting import HANGS_S

ROOT = Path(__file__).parents[2]
REQUEST = Request("adaptive", 3, 4, Costs.of(1, 1.1, 0.75, 0.05), memory_limit=0.7, search_seconds=0.01)
LARGE = Request("1f1b", 8, 512)


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


def test_the_same_is_searched_once(kept: Path, searched: list[Request], caplog: pytest.LogCaptureFixture):
    heard: list[float] = []
    first = cached_plan(REQUEST, heard.append)
    assert sum(heard) == pytest.approx(1)
    assert first == cached_plan(replace(REQUEST)) == plan(REQUEST)
    assert searched == [REQUEST]
    (path,) = (path for path in kept.iterdir() if path.is_file())
    assert path.suffix == ".json" and path.stat().st_mode & 0o777 == 0o600
    assert not caplog.messages


@pytest.mark.parametrize(
    "other",
    [
        replace(REQUEST, microbatches=5),
        replace(REQUEST, memory_limit=0.8),
        replace(REQUEST, search_seconds=0.02),
        replace(REQUEST, chunk_choices=(1, 2)),
        replace(REQUEST, costs=Costs.of(1, 1.1, 0.75, 0.0500001)),
        replace(REQUEST, costs=uneven(REQUEST.costs, (1.0,) * 12)),
    ],
    ids=["microbatches", "limit", "seconds", "chunks", "link latency", "layers"],
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
    monkeypatch.setattr(private_folder, "__file__", str(tmp_path / "utils" / "private_folder.py"))
    cached_plan(REQUEST)
    cached_plan(REQUEST)
    assert len(searched) == 1
    (tmp_path / "search" / "climb.py").write_text("another")
    cached_plan(REQUEST)
    assert len(searched) == 2


def result(request: Request) -> Callable[[bytes], bytes]:
    """Puts the plan of another request in a file, under the file's own key."""
    return lambda whole: json.dumps(json.loads(whole) | {"result": to_record(plan(request))}).encode()


def changed(**changes: Any) -> Callable[[bytes], bytes]:
    """Changes fields of the plan in a file."""

    def change(whole: bytes) -> bytes:
        record = json.loads(whole)
        return json.dumps(record | {"result": record["result"] | changes}).encode()

    return change


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda whole: b"",
    "bytes": lambda whole: b"\xff\x00",
    "half": lambda whole: whole[: len(whole) // 2],
    "list": lambda whole: b"[]",
    "nested": lambda whole: b"[" * 100_000,
    "another key": lambda whole: json.dumps(json.loads(whole) | {"key": "other"}).encode(),
    "other sizes": result(replace(REQUEST, microbatches=5)),
    "other ranks": result(replace(REQUEST, ranks=4)),
    "a deadlock": changed(order=[["0F0"]] * 3),
    "no order": changed(order=3),
    "no numbers": changed(microbatches="four"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_or_foreign_file_is_replaced_and_the_log_says_so_once(
    kept: Path, searched: list[Request], damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
):
    schedule = cached_plan(REQUEST)
    (path,) = kept.glob("*.json")
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    for _ in range(2):
        assert cached_plan(REQUEST) == schedule
    assert len(searched) == 2
    assert path.read_bytes() == whole
    (said,) = caplog.messages
    assert said.startswith(f"pipeline schedule: {path} does not hold a plan for its request (")
    assert said.endswith("): planned anew")


def test_a_partition_or_shares_for_other_stages_are_searched_anew(kept: Path, caplog: pytest.LogCaptureFixture):
    costs = replace(REQUEST.costs, model=loads(MODELS["Llama-3-8B"].whole))
    request = replace(REQUEST, ranks=2, costs=costs, chunk_choices=(2,), memory_limit=0.5, recompute=True)
    for cached, name, field in ((cached_partition, "layers", "layers"), (cached_saving, "saving", "recomputed")):
        made = cached(request)
        (path,) = kept.glob(f"{name}-*.json")
        whole = path.read_bytes()
        record = json.loads(whole)
        assert len(record["result"][field]) == 4
        record["result"][field] = record["result"][field][:3]
        path.write_text(json.dumps(record))
        assert cached(request) == made
        assert path.read_bytes() == whole
    assert len(caplog.messages) == 2


def test_without_a_usable_folder_it_plans_all_the_same(
    searched: list[Request], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(PLANS_VARIABLE, str(tmp_path / "file" / "plans"))
    assert cached_plan(REQUEST) == cached_plan(REQUEST) == plan(REQUEST)
    assert len(searched) == 2
    assert len(caplog.messages) == 1


def test_on_a_full_disk_it_plans_all_the_same(kept: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(private_folder.os, "replace", full)
    assert cached_plan(REQUEST) == plan(REQUEST)
    assert not any(path.is_file() for path in kept.iterdir())


def test_what_cannot_be_planned_is_not_kept(kept: Path):
    for _ in range(2):
        with pytest.raises(PlanError, match="too small"):
            cached_plan(replace(REQUEST, memory_limit=0.01))
    assert not list(kept.glob("*.json"))


def test_large_plans_by_name_are_kept_and_small_ones_are_not(kept: Path, searched: list[Request]):
    small = replace(REQUEST, schedule="v-half")
    for request in (small, small, LARGE, LARGE):
        assert cached_plan(request) == plan(request)
    assert searched == [small, small, LARGE]
    assert len(list(kept.glob("*.json"))) == 1


AT_ONCE = """
import sys
from megatron.schedules.planner import plan_cache
from megatron.schedules.schedule.text_forms import to_csv
from tests.planner.test_plan_cache import LARGE

def together(request, progress):
    print("planning", flush=True)
    sys.stdin.readline()
    return plan(request, progress)

plan, plan_cache.plan = plan_cache.plan, together
print(to_csv(plan_cache.cached_plan(LARGE)))
"""


def test_two_processes_at_once_get_the_same_plan_and_none_waits_for_the_other(kept: Path, searched: list[Request]):
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", AT_ONCE]
    planners = [subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) for _ in range(2)]
    for planner in planners:
        assert planner.stdout and planner.stdout.readline() == "planning\n"
    plans = [planner.communicate("go\n", timeout=HANGS_S)[0] for planner in planners]
    assert [planner.returncode for planner in planners] == [0, 0]
    assert plans[0] == plans[1]
    assert cached_plan(LARGE) == plan(LARGE)
    assert not searched, "read"
