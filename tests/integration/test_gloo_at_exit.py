"""A process that used gloo ends only when gloo's threads are idle."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.schedules.integration.cpu import gloo_at_exit
from megatron.schedules.integration.cpu.gloo_at_exit import wait_until_idle
from tests.waiting import HANGS_S

COLLECTIVES = """
import torch, torch.distributed as dist
from megatron.schedules.integration.cpu.gloo_at_exit import wait_at_exit

wait_at_exit()
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
for _ in range(50):
    dist.all_reduce(torch.ones(1000))
"""


def a_gloo_thread(pieces: int, done: list[int], stop: threading.Event) -> threading.Thread:
    """A thread under the name torch gives gloo's, which does some pieces of work and then waits for more."""

    def run() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("pt_gloo_runloop")
        named.set()
        for piece in range(pieces):
            time.sleep(0.001)
            done.append(piece)
        stop.wait()

    named = threading.Event()
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    named.wait()
    return thread


def test_it_waits_for_a_thread_that_is_at_work_and_not_for_one_that_is_idle(monkeypatch):
    monkeypatch.setattr(gloo_at_exit, "_AT_MOST_S", 10 * HANGS_S)
    stop, done = threading.Event(), []
    threads = [a_gloo_thread(pieces, done, stop) for pieces in (0, 300)]
    wait_until_idle()
    finished = len(done)
    stop.set()
    for thread in threads:
        thread.join()
    assert finished == 300


def test_without_gloo_it_returns_after_one_pause(monkeypatch):
    pauses = []
    monkeypatch.setattr(gloo_at_exit, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=pauses.append))
    wait_until_idle()
    assert len(pauses) == 1


def test_it_gives_up_on_a_thread_that_never_rests(monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr(gloo_at_exit, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda _: None))
    monkeypatch.setattr(gloo_at_exit, "_activity", lambda: {"1": (next(clock),)})
    wait_until_idle()
    assert next(clock) < 100


@pytest.mark.nightly
def test_a_process_that_just_ended_its_collectives_ends_well():
    done = subprocess.run([sys.executable, "-c", COLLECTIVES], capture_output=True, text=True, timeout=HANGS_S)
    assert done.returncode == 0, done.stderr
