"""No process that a tool starts outlives it, and none imports from the folder in which the tool is called."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import endless
from tests.waiting import until

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[2]
POOL = """
from megatron.schedules.utils.child_processes import worker_pool
with worker_pool(2) as pool:
    list(pool.map(endless, range(20)))
"""
# Each starts two processes that never end, or as many as are said.
STARTS = {
    "a pool of the grid search and of the benchmarks": POOL,
    "workers that tokenize": """
from tools import preprocess_data
list(preprocess_data.encode_all(iter(range(100)), endless, 2))
""",
    "a benchmark in a process of its own": """
from benchmarks.apart import rows_apart
list(rows_apart(endless, True, print))  # 1
""",
    "emulated ranks": """
from benchmarks.emulated_ranks import run_ranks
run_ranks(2, endless, 600)
""",
    "forked ranks of the GPU tests": """
from tests.gpu.ranks import run_ranks
run_ranks(2, endless, {}, timeout=600)
""",
    "new ranks of the GPU tests": """
from tests.gpu.ranks import run_ranks
run_ranks(2, endless, {}, timeout=600, fresh=True)
""",
}


@contextmanager
def parent_of(
    command: list[str], cwd: Path, notes: Path, begun: Callable[[psutil.Process], bool]
) -> Iterator[tuple[subprocess.Popen[bytes], list[int]]]:
    """A process and all that it started, once that has ``begun``; whatever is left is ended afterwards."""
    notes.mkdir()
    environment = os.environ | {endless.FOLDER_VARIABLE: str(notes), "PYTHONPATH": str(ROOT)}
    log = notes.with_suffix(".log")
    with log.open("w") as file:
        # A session of its own: no signal of this test's terminal reaches it.
        how: dict[str, Any] = {"stdout": file, "stderr": file, "start_new_session": True}
        # Under nohup, SIGHUP is ignored, which children inherit.
        parent = subprocess.Popen(command, cwd=cwd, env=environment, preexec_fn=_heed_hangups, **how)
    children: list[int] = []
    try:
        process = psutil.Process(parent.pid)

        def come() -> bool:
            assert parent.poll() is None, log.read_text()
            try:
                return begun(process)
            except psutil.NoSuchProcess:  # a child has ended while it was looked at
                return False

        until(come, f"what writes {log}")
        children = [child.pid for child in process.children(recursive=True)]
        yield parent, children
    finally:
        parent.kill()
        parent.wait()
        for child in endless.running(children):
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)


def _heed_hangups() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def program(text: str) -> list[str]:
    return [sys.executable, "-W", "ignore", "-c", "import os\nfrom tests.endless import endless\n" + text]


@pytest.mark.parametrize("what", STARTS)
def test_what_a_tool_has_started_ends_when_the_tool_is_killed(what: str, tmp_path: Path) -> None:
    notes, count = tmp_path / "notes", 1 if "# 1" in STARTS[what] else 2
    with parent_of(program(STARTS[what]), ROOT, notes, lambda _: len(endless.workers(notes)) == count) as (
        parent,
        children,
    ):
        assert set(endless.workers(notes)) <= set(children)
        parent.kill()
        parent.wait()
        assert endless.all_end(children)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP], ids=lambda how: how.name)
def test_a_tool_that_is_told_to_end_does_so_with_its_workers(how: signal.Signals, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    with parent_of(program(POOL), ROOT, notes, lambda _: len(endless.workers(notes)) == 2) as (parent, children):
        parent.send_signal(how)
        assert parent.wait(60) != 0
        assert endless.all_end(children)


@pytest.mark.job
def test_a_killed_grid_search_leaves_no_process(tmp_path: Path) -> None:
    size = ["--model", "98.5B", "--gpus", "40", "--sequence-length", "16384", "--batch-size", "160"]
    command = [sys.executable, str(ROOT / "tools/grid_search.py"), *size, "--save-memory", "--jobs", "2"]

    def searching(parent: psutil.Process) -> bool:
        # Both have imported the search and come to use it.
        found = [child for child in parent.children() if "spawn_main" in " ".join(child.cmdline())]
        return len([child for child in found if any("llvmlite" in each.path for each in child.memory_maps())]) == 2

    with parent_of(command, tmp_path, tmp_path / "notes", searching) as (parent, children):
        time.sleep(3)
        assert len(children) >= 2 and endless.running(children) == children
        parent.kill()
        parent.wait()
        assert endless.all_end(children)


TRAINS = """
import sys
from pathlib import Path
from typing import Any
from megatron.schedules.estimate.devices import DEVICES
from tools._iteration import estimate
from tools._methods import METHODS
from tools._setting import Setting
from megatron.schedules.estimate.models import Model
from tools._run_settings import run_setting
sizes = "--num-layers 6 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 96"
model = Model("tiny", f"{sizes} --untie-embeddings-and-output-weights")
cpu = "--distributed-backend gloo --transformer-impl local --no-gradient-accumulation-fusion --num-workers 0"
fusions = "--no-masked-softmax-fusion --no-bias-dropout-fusion --no-persist-layer-norm --train-iters 100000"
setting = Setting(METHODS[4], model, DEVICES["A100-80GB"], 1, 1, 2, 1, 4)
run_setting(estimate(setting), Path(os.environ["ENDLESS_WORK_NOTES"]), [*cpu.split(), *fusions.split()])
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT], ids=lambda how: how.name)
def test_a_training_that_validates_a_grid_search_ends_with_it(how: signal.Signals, tmp_path: Path) -> None:
    def trains(parent: psutil.Process) -> bool:
        # Ranks, not torchrun, which has the name among its arguments too. While it starts them it knows of none.
        names = [child.cmdline() for child in parent.children(recursive=True)]
        if len([name for name in names if "pretrain_gpt.py" in name and "--standalone" not in name]) < 2:
            return False
        time.sleep(3)
        return True

    with parent_of(program(TRAINS), ROOT, tmp_path / "notes", trains) as (parent, children):
        parent.send_signal(how)
        parent.wait(100)
        assert endless.all_end(children, 100)


@pytest.mark.parametrize(
    "text",
    [
        "from megatron.schedules.utils.child_processes import worker_pool\n"
        "if __name__ == '__main__':\n    with worker_pool(1) as pool: print(pool.submit(abs, -3).result())\n",
        "from benchmarks.apart import rows_apart\nfrom tests.endless import three\n"
        "if __name__ == '__main__':\n    print(*rows_apart(three, True, print))\n",
    ],
    ids=["pool", "benchmark"],
)
def test_no_worker_imports_from_the_working_directory(text: str, tmp_path: Path) -> None:
    program, called_in = tmp_path / "tool" / "program.py", tmp_path / "here"
    for folder in (program.parent, called_in):
        folder.mkdir()
    program.write_text(text)
    for name in ("pickle", "signal", "heapq", "json", "numba"):
        (called_in / f"{name}.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'a').write('{name} ')\n")
    done = subprocess.run(
        [sys.executable, str(program)],
        cwd=called_in,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.stdout == "3\n", done.stderr
    assert not (tmp_path / "executed").exists()


@pytest.mark.pure
@pytest.mark.parametrize("folder", [".", "benchmarks", "tools", "scripts"])
def test_no_program_lies_beside_a_file_named_as_a_module_of_the_standard_library(folder: str) -> None:
    # A script's own folder comes first when it imports.
    assert not {path.stem for path in (ROOT / folder).iterdir()} & sys.stdlib_module_names
