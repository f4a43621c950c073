"""Copies beside what a device computes: their order, their rate, and what they wait for."""

from __future__ import annotations

import ctypes
import gc
import mmap
import re
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.schedules.runtime import copies, free_host_memory
from megatron.schedules.runtime.copies import Pace, StreamCopies, ThreadCopies, copies_on
from megatron.schedules.runtime.free_host_memory import available_host_bytes
from megatron.schedules.runtime.host_buffers import HostMemory


def pair(size: int = 8, value: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((size,), value, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)


# --- in threads ---------------------------------------------------------------------------------------------------


class StoppedClock:
    """A clock that stands at 0: what a thread sleeps is until when, in seconds. Nobody wakes before :meth:`go_on`."""

    def __init__(self) -> None:
        self.slept: dict[int, list[float]] = defaultdict(list)
        self._awake = threading.Event()
        self.pace = Pace(lambda: 0.0, self._sleep)
        self.go_on = self._awake.set

    def _sleep(self, seconds: float) -> None:
        self.slept[threading.get_ident()].append(seconds)
        assert self._awake.wait(600)


def test_copies_take_the_configured_time_one_after_another_each_way():
    clock = StoppedClock()
    made = ThreadCopies(gbps=1e-3, pace=clock.pace)  # a million bytes a second
    out = [made.to_host([pair(30_000)]), made.to_host([pair(10_000), pair(20_000)])]
    back = made.from_host([pair(30_000)])
    clock.go_on()  # we come here while all copies stand still: to begin them waits for nothing
    for copying in (back, *out):
        copying.wait()
    assert threading.get_ident() not in clock.slept
    assert sorted(clock.slept.values()) == [pytest.approx([0.03]), pytest.approx([0.03, 0.06])]


def test_a_copy_that_is_begun_later_ends_later():
    now = iter((5.0, 5.5))  # as it is begun, and as it has been carried out
    slept: list[float] = []
    ThreadCopies(1e-6, pace=Pace(lambda: next(now), slept.append)).to_host([pair(2000)]).wait()
    assert slept == pytest.approx([1.5])


def test_one_way_at_a_time():
    clock = StoppedClock()
    made = ThreadCopies(1e-3, both_ways=False, pace=clock.pace)
    clock.go_on()
    made.to_host([pair(30_000)])
    made.from_host([pair(30_000)]).wait()
    assert list(clock.slept.values()) == [pytest.approx([0.03, 0.06])]


def test_what_is_waited_for_has_been_copied():
    made, pairs = ThreadCopies(), [pair(100, value) for value in range(1, 5)]
    made.to_host(pairs).wait()
    assert all(torch.equal(source, target) for source, target in pairs)


def test_memory_is_not_written_before_it_has_been_read():
    made = ThreadCopies(1e-3)
    memory, read = torch.full((20_000,), 7, dtype=torch.uint8), torch.zeros(20_000, dtype=torch.uint8)
    last = made.from_host([pair(10_000), (memory, read)])
    made.to_host([(torch.zeros_like(memory), memory)], after=last).wait()
    assert (read == 7).all() and (memory == 0).all()


def test_an_error_is_raised_where_the_copy_is_waited_for_and_others_go_on():
    made, good = ThreadCopies(), pair()
    bad = made.to_host([(torch.zeros(3, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8))])
    made.to_host([good]).wait()
    with pytest.raises(RuntimeError, match="size"):
        bad.wait()


def test_there_is_a_thread_only_where_something_is_copied_and_as_long_as_it_may_be():
    before, made = threading.enumerate(), ThreadCopies()
    assert set(threading.enumerate()) <= {*before}
    made.to_host([pair()]).wait()
    (lane,) = {*threading.enumerate()} - {*before}
    del made
    gc.collect()
    lane.join(10)
    assert not lane.is_alive()


def test_the_device_decides(monkeypatch: pytest.MonkeyPatch):
    assert isinstance(copies_on(torch.device("cpu")), ThreadCopies)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: object())
    assert isinstance(copies_on(torch.device("cuda", 5)), StreamCopies)


# --- on streams ---------------------------------------------------------------------------------------------------


class FakeStream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self._log, self.events = name, log, 0

    def wait_stream(self, other: FakeStream) -> None:
        self._log.append(f"{self.name} waits for {other.name}")

    def record_event(self) -> str:
        self.events += 1
        return f"event {self.events} of {self.name}"

    def wait_event(self, event: str) -> None:
        self._log.append(f"{self.name} waits for {event}")


class FakeCuda:
    """Streams that say what they are told, in place of ``torch.cuda``."""

    def __init__(self, status: int = 0) -> None:
        self.log: list[str] = []
        self.pinned: list[tuple[int, int]] = []
        names = iter(("out", "back"))
        self.Stream = lambda device: FakeStream(next(names), self.log)
        self.current = self.main = FakeStream("main", self.log)
        runtime = SimpleNamespace(cudaHostRegister=self._register, cudaHostUnregister=self._unregister)
        self._status, self.cudart = status, lambda: runtime

    def _register(self, start: int, size: int, _: int) -> int:
        self.pinned.append((start, size))
        return self._status

    def _unregister(self, start: int) -> None:
        self.pinned = [each for each in self.pinned if each[0] != start]

    def current_stream(self, device: torch.device) -> FakeStream:
        return self.current

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self.current = stream
        yield
        self.current = self.main


def on_streams(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> StreamCopies:
    def copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
        assert non_blocking, "the host would wait"
        cuda.log.append(f"copy of {source.nbytes} on {cuda.current.name}")

    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    return StreamCopies(torch.device("cuda", 0), cuda=cuda, **settings)


def test_copies_begin_after_queued_work_and_the_device_waits_only_where_required(monkeypatch):
    cuda = FakeCuda()
    made = on_streams(cuda, monkeypatch)
    out = made.to_host([pair(3), pair(5)])
    assert cuda.log == ["out waits for main", "copy of 3 on out", "copy of 5 on out"]
    del cuda.log[:]
    out.wait()
    assert cuda.log == ["main waits for event 1 of out"]
    del cuda.log[:]
    back = made.from_host([pair(4)])
    assert cuda.log == ["back waits for main", "copy of 4 on back"]
    del cuda.log[:]
    made.to_host([pair(6)], after=back)
    assert cuda.log == ["out waits for main", "out waits for event 1 of back", "copy of 6 on out"]


def test_one_stream_where_one_way_at_a_time_is_asked_for(monkeypatch):
    cuda = FakeCuda()
    made = on_streams(cuda, monkeypatch, both_ways=False)
    made.to_host([pair(3)])
    made.from_host([pair(4)])
    assert cuda.log[1::2] == ["copy of 3 on out", "copy of 4 on out"]


def test_a_copy_is_marked_on_its_own_stream(monkeypatch):
    cuda = FakeCuda()
    made = on_streams(cuda, monkeypatch)
    made.watch = SimpleNamespace(copying=lambda: lambda: cuda.log.append(f"mark on {cuda.current.name}"))
    made.to_host([pair(3), pair(5)])
    made.from_host([pair(4)])
    assert [line for line in cuda.log if "waits" not in line] == [
        *("mark on out", "copy of 3 on out", "copy of 5 on out", "mark on out"),
        *("mark on back", "copy of 4 on back", "mark on back"),
    ]


def test_host_memory_is_pinned_as_it_is_and_as_long_as_it_lives():
    cuda = FakeCuda()
    memory = StreamCopies(torch.device("cuda", 0), cuda=cuda).allocate(5000)
    assert cuda.pinned == [(memory.data_ptr(), 5000)] and memory.nbytes == 5000
    memory.fill_(1)
    part = memory[10:]
    del memory
    gc.collect()
    assert cuda.pinned, "a part of it still lives"
    del part
    gc.collect()
    assert not cuda.pinned


def test_no_two_pinned_blocks_share_a_page_and_children_do_not_get_them():
    made = StreamCopies(torch.device("cuda", 0), cuda=FakeCuda())
    blocks = [made.allocate(size) for size in (1, 100, mmap.PAGESIZE, mmap.PAGESIZE + 1, 3 * mmap.PAGESIZE)]
    starts = [block.data_ptr() for block in blocks]
    assert all(start % mmap.PAGESIZE == 0 for start in starts)
    pages = [
        {*range(b.data_ptr() // mmap.PAGESIZE, (b.data_ptr() + b.nbytes - 1) // mmap.PAGESIZE + 1)} for b in blocks
    ]
    assert len(set().union(*pages)) == sum(map(len, pages))
    assert all("dc" in _mapping_flags(start) for start in starts), "dc: not copied by a fork"


def _mapping_flags(address: int) -> list[str]:
    """What the kernel says of the mapping with ``address``."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError("not mapped")


def test_memory_is_unpinned_while_it_is_still_mapped():
    mapped: list[bytes] = []
    cuda = FakeCuda()
    cuda._unregister = lambda start: mapped.append(ctypes.string_at(start, 1))
    cuda.cudart = lambda: SimpleNamespace(cudaHostRegister=cuda._register, cudaHostUnregister=cuda._unregister)
    memory = StreamCopies(torch.device("cuda", 0), cuda=cuda).allocate(5000)
    memory.fill_(7)
    del memory
    gc.collect()
    assert mapped == [bytes([7])]


def test_memory_that_cannot_be_pinned_is_an_error():
    with pytest.raises(MemoryError, match="CUDA's error 2"):
        StreamCopies(torch.device("cuda", 0), cuda=FakeCuda(status=2)).allocate(5000)


# --- host memory --------------------------------------------------------------------------------------------------


def test_a_block_fits_and_is_not_far_too_large():
    memory = HostMemory(ThreadCopies().allocate)
    sizes = [memory.take(size) for size in (10_000, 20_000, 100_000)]
    assert [block.memory.nbytes for block in sizes] == [12_288, 24_576, 106_496], "a little larger, and whole pages"
    for number, block in enumerate(sizes):
        memory.release(block, f"copy {number}")
    found = memory.take(12_288)
    assert found.memory is sizes[0].memory and found.read_by == "copy 0"
    assert memory.take(12_288).memory is sizes[1].memory, "the next larger one"
    assert memory.take(12_288).memory.nbytes == 16_384, "not a tenth of one"
    assert memory.bytes == 12_288 + 24_576 + 106_496 + 16_384


def test_stages_that_differ_by_a_little_share_a_block():
    memory = HostMemory(ThreadCopies().allocate)
    block = memory.take(659_456)
    memory.release(block, None)
    assert memory.take(667_648).memory is block.memory


def test_of_equal_blocks_the_one_released_first_is_used():
    memory = HostMemory(ThreadCopies().allocate)
    blocks = [memory.take(4096) for _ in range(3)]
    for block in blocks:
        memory.release(block, None)
    assert [memory.take(4096).memory.data_ptr() for _ in blocks] == [block.memory.data_ptr() for block in blocks]


def test_more_than_the_host_has_is_refused_before_it_is_tried(monkeypatch, tmp_path):
    monkeypatch.setattr("megatron.schedules.runtime.host_buffers.available_host_bytes", lambda: 2**30)
    with pytest.raises(MemoryError, match="the host has 1 GiB left"):
        HostMemory(lambda size: pytest.fail("tried")).take(2**31)


def test_what_the_kernel_and_the_control_groups_leave(monkeypatch, tmp_path):
    info, own, groups = tmp_path / "meminfo", tmp_path / "cgroup", tmp_path / "groups"
    monkeypatch.setattr(free_host_memory, "_MEMORY_INFO", info)
    monkeypatch.setattr(free_host_memory, "_OWN_GROUP", own)
    monkeypatch.setattr(free_host_memory, "_GROUPS", groups)
    assert available_host_bytes() is None
    info.write_text("MemTotal: 4000 kB\nMemAvailable:  2000 kB\n")
    own.write_text("0::/job/step\n")
    assert available_host_bytes() == 2000 * 1024
    for folder, limit, held in ((groups / "job" / "step", "max", 10), (groups / "job", "1000000", 300_000)):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.stat").write_text(f"anon {held}\nfile 500000\nshmem 1\n")
    assert available_host_bytes() == 1_000_000 - 300_001
    (groups / "job" / "step" / "memory.max").write_text("5\n")
    assert available_host_bytes() == 0


def test_streams_are_made_once():
    copies._streams.cache_clear()
    cuda, device = FakeCuda(), torch.device("cuda", 0)
    assert StreamCopies(device, cuda=cuda)._out is StreamCopies(device, cuda=cuda)._out
