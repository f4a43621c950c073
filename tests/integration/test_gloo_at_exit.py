"""A process that used gloo ends only when gloo's threads are idle."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

from megatron.schedules.integration.cpu.gloo_at_exit import wait_until_idle

COLLECTIVES = """
import torch, torch.distributed as dist
from megatron.schedules.integration.cpu.gloo_at_exit import wait_at_exit

wait_at_exit()
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
for _ in range(50):
    dist.all_reduce(torch.ones(1000))
"""


def a_gloo_thread(busy: float, stop: threading.Event) -> threading.Thread:
    """A thread under the name torch gives gloo's, which works for a while and then waits for work."""

    def run() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("pt_gloo_runloop")
        named.set()
        until = time.monotonic() + busy
        while time.monotonic() < until:
            time.sleep(0.001)
        stop.wait()

    named = threading.Event()
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    named.wait()
    return thread


def test_it_waits_for_a_thread_that_is_at_work_and_not_for_one_that_is_idle():
    stop = threading.Event()
    threads = [a_gloo_thread(busy, stop) for busy in (0.0, 0.5)]
    begun = time.monotonic()
    wait_until_idle()
    waited = time.monotonic() - begun
    stop.set()
    for thread in threads:
        thread.join()
    assert 0.4 < waited < 4


def test_without_gloo_it_returns_at_once():
    begun = time.monotonic()
    wait_until_idle()
    assert time.monotonic() - begun < 1


def test_a_process_that_just_ended_its_collectives_ends_well():
    done = subprocess.run([sys.executable, "-c", COLLECTIVES], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
