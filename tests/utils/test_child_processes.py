"""A child process ends with its parent; it has the package of its parent and nothing of the working directory."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.schedules.utils import child_processes
from tests import endless

ROOT = Path(__file__).parents[2]
PROBE = """
import json, heapq, importlib.util
def main():
    numba = importlib.util.find_spec("numba").origin
    print(json.dumps({"ours": __file__, "json": json.__file__, "heapq": heapq.__file__, "numba": numba}))
"""
# By then the parent has imported what it needs, by its own rules.
STARTS_PROBE = """
import shutil, subprocess
from megatron.schedules.utils.child_processes import isolated_command, isolated_environment
shutil.copytree({traps!r}, ".", dirs_exist_ok=True)
command = isolated_command("megatron.schedules.utils.probe")
print(subprocess.run(command, env=isolated_environment(), check=True, capture_output=True, text=True).stdout)
"""
REPLANS = """
import time
from megatron.schedules.planner.background import BackgroundPlan
from megatron.schedules.planner.registry import plan
from megatron.schedules.planner.request import Request
request = Request("v-half", 4, 8)
way = BackgroundPlan(request, plan(request), 200)
while (found := way.poll()) is None:
    time.sleep(0.05)
print("replanned", found.before.makespan > 0)
"""


def make_traps(folder: Path) -> None:
    """Modules that note their import in a file ``executed`` of ``folder``."""
    folder.mkdir()
    for name in ("heapq", "json", "numba", "pickle", "types", "sitecustomize"):
        (folder / f"{name}.py").write_text(f"open({str(folder / 'executed')!r}, 'a').write('{name} ')\n")


@pytest.mark.parametrize("found_by", ["PYTHONPATH", "the script's folder", "a path inserted", "the working directory"])
def test_a_child_takes_the_package_from_where_its_parent_does_and_libraries_from_elsewhere(
    found_by: str, tmp_path: Path
) -> None:
    checkout, elsewhere, called_in = tmp_path / "checkout", tmp_path / "job", tmp_path / "here"
    for folder in (elsewhere, called_in):
        folder.mkdir()
    make_traps(traps := tmp_path / "traps")
    # Another one than the installed one: only this one has the probe.
    for name in ("__init__.py", "utils/__init__.py", "utils/child_processes.py"):
        copy = checkout / "megatron/schedules" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "megatron/schedules" / name, copy)
    (checkout / "megatron/schedules/utils/probe.py").write_text(PROBE)
    script, environment = elsewhere / "job.py", dict(os.environ)
    text = STARTS_PROBE.format(traps=str(traps))
    environment.pop("PYTHONPATH", None)
    match found_by:
        case "PYTHONPATH":
            environment["PYTHONPATH"] = str(checkout)
        case "the script's folder":
            script = checkout / "job.py"
        case "a path inserted":
            text = f"import sys; sys.path.insert(0, {str(checkout)!r})\n{text}"
        case "the working directory":
            called_in, text = checkout, f"import sys; sys.path.insert(0, '')\n{text}"
    script.write_text(text)
    done = subprocess.run(
        [sys.executable, str(script)], cwd=called_in, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.pop("ours") == str(checkout / "megatron/schedules/utils/probe.py")
    assert not [origin for origin in found.values() if origin.startswith(str(tmp_path))]
    assert not (traps / "executed").exists()


def test_replanning_executes_nothing_that_lies_in_the_working_directory(tmp_path: Path) -> None:
    script, called_in = tmp_path / "job" / "job.py", tmp_path / "here"
    script.parent.mkdir()
    script.write_text(REPLANS)
    make_traps(called_in)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=called_in, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.stdout == "replanned True\n", done.stderr
    assert not (called_in / "executed").exists()


def test_a_working_directory_that_was_removed_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend("")
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert child_processes.isolated_command("any.module")[-1]


ENDS = "from megatron.schedules.utils import child_processes; child_processes.end_with_parent({parent}); print('on')"


def test_a_child_whose_parent_is_gone_already_ends_at_once() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for parent, status, said in ((gone.pid, -9, ""), (os.getpid(), 0, "on\n"), (None, 0, "on\n")):
        done = subprocess.run(
            [sys.executable, "-c", ENDS.format(parent=parent)], cwd=ROOT, capture_output=True, text=True, timeout=120
        )
        assert (done.returncode, done.stdout) == (status, said), done.stderr


WATCHES = """
import multiprocessing, time
from megatron.schedules.utils import child_processes
child_processes._signalled_by_kernel = lambda by: False
def work():
    child_processes.end_with_parent()
    time.sleep(600)
child = multiprocessing.get_context("fork").Process(target=work)
child.start()
print(child.pid, flush=True)
child.join()
"""


def test_where_the_kernel_does_not_end_a_child_a_thread_does() -> None:
    with subprocess.Popen([sys.executable, "-c", WATCHES], cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        time.sleep(1.5)  # it has looked once, and its parent was there
        assert endless.running([child])
        parent.kill()
        parent.wait()
        assert endless.all_end([child])
