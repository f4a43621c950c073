"""Chains of collective calls: in one order beside the program, on a thread or on a stream, and how they fail."""

from __future__ import annotations

import gc
import multiprocessing
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.schedules.runtime.collectives import SideStream, Worker, collectives_on
from megatron.schedules.runtime.transport import Channels, MessageSpec, Transport, make_collective_group
from tests.ranks import run_ranks
from tests.waiting import until

pytestmark = pytest.mark.job

CPU = torch.device("cpu")
SPEC = MessageSpec((4,), torch.float32, CPU)


def workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "pipeline collectives"]


# --- in a thread --------------------------------------------------------------------------------------------------


def test_chains_run_in_order_while_the_program_goes_on():
    worker, seen, go = Worker(), [], threading.Event()

    def chain(number: int) -> Callable[[], Tensor | None]:
        def carried_out() -> Tensor | None:
            go.wait(10)
            assert not torch.is_grad_enabled()
            seen.append((number, threading.current_thread().name))
            return torch.full((2,), float(number)) if number % 2 else None

        return carried_out

    coming = [worker.post(chain(number)) for number in range(6)]
    assert not seen, "posting waits for nothing"
    go.set()
    assert [coming[number].wait()[0].item() for number in (5, 1, 3)] == [5, 1, 3]
    worker.finish()
    assert seen == [(number, "pipeline collectives") for number in range(6)]


def test_the_result_of_a_chain_has_no_history_and_is_freed_once_it_is_taken():
    worker, weight = Worker(), torch.ones(3, requires_grad=True)
    coming = worker.post(lambda: weight * 2)
    given = coming.wait()
    assert given.is_leaf and not given.requires_grad
    storage = weakref.ref(given.untyped_storage())
    del given
    gc.collect()
    assert storage() is None
    assert worker.post(lambda: weight).wait().is_leaf, "though the chain gives what was there"
    worker.finish()


def test_there_is_a_thread_only_where_something_is_posted_and_until_the_end():
    before = workers()
    transport = Transport(Channels({}, {}, CPU), SPEC)
    transport.finish()
    assert workers() == before
    for _ in range(2):
        transport.collective(lambda: None)
        assert len(workers()) == len(before) + 1
        transport.finish()
        assert workers() == before


def test_an_abandoned_run_leaves_no_thread():
    before = workers()
    transport = Transport(Channels({}, {}, CPU), SPEC)
    transport.collective(lambda: None)
    del transport
    gc.collect()
    until(lambda: workers() == before, "the thread's end")


def test_messages_of_any_shape_go_with_collectives_too():
    none = Channels({}, {}, CPU)
    transport = Transport(none, SPEC, shapes=none)
    assert transport.collective(lambda: torch.ones(3)).wait().sum() == 3
    transport.finish()


def test_after_an_error_no_chain_runs_and_all_raise_it():
    before, worker, carried_out = workers(), Worker(60), []

    def raising() -> Tensor:
        raise ValueError("no good")

    first, second = worker.post(lambda: torch.ones(1)), worker.post(raising)
    third = worker.post(lambda: carried_out.append(3))
    assert first.wait() == 1
    for coming in (third, second, worker.post(lambda: carried_out.append(4))):
        with pytest.raises(ValueError, match="no good"):
            coming.wait()
    with pytest.raises(ValueError, match="no good"):
        worker.finish()
    assert not carried_out and workers() == before


def test_an_unreported_error_ends_the_process_with_a_line(capsys: pytest.CaptureFixture[str]):
    lines: list[str] = []
    worker = Worker(0.05, lines.append)
    worker.post(lambda: torch.ones(2) @ torch.ones(3))
    (line,) = until(lambda: lines, "the line")
    assert "error: a collective of the pipeline failed: RuntimeError(" in line and "\n" not in line
    assert "Traceback" in capsys.readouterr().err


def test_a_reported_error_does_not_end_the_process():
    lines: list[str] = []
    worker = Worker(0.05, lines.append)
    with pytest.raises(RuntimeError):
        worker.post(lambda: torch.ones(2) @ torch.ones(3)).wait()
    time.sleep(0.3)
    assert not lines


def test_a_chain_that_gives_nothing_where_a_pass_takes_it_is_an_error():
    worker = Worker()
    with pytest.raises(RuntimeError, match="a collective returned nothing on a rank where a pass takes its result"):
        worker.post(lambda: None).wait()
    worker.finish()


def _leaves_it_hanging() -> None:
    Worker().post(lambda: threading.Event().wait(1000))  # type: ignore[arg-type, return-value, func-returns-value]


def test_a_process_whose_chain_never_ends_can_end():
    process = multiprocessing.get_context("spawn").Process(target=_leaves_it_hanging)
    process.start()
    process.join(60)
    assert process.exitcode == 0


# --- on a stream --------------------------------------------------------------------------------------------------


class FakeEvent(NamedTuple):
    stream: FakeStream
    number: int


class FakeStream:
    """Notes what it waits for."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log, self.events = name, log, 0

    def wait_stream(self, other: FakeStream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: FakeEvent) -> None:
        self.log.append(f"{self.name} waits for event {event.number} of {event.stream.name}")

    def record_event(self) -> FakeEvent:
        self.log.append(f"{self.name} records event {self.events}")
        self.events += 1
        return FakeEvent(self, self.events - 1)


class FakeCuda:
    """``torch.cuda``, as far as a side stream uses it."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.main, self.side = FakeStream("main", self.log), FakeStream("side", self.log)
        self.current = self.main
        self.made: list[tuple[torch.device, int]] = []

    def Stream(self, device: torch.device, priority: int) -> FakeStream:  # noqa: N802 - the name in torch
        self.made.append((device, priority))
        return self.side

    def current_stream(self, device: torch.device) -> FakeStream:
        return self.current

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self.current = stream
        yield
        self.current = self.main


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda()


def test_a_chain_runs_in_the_background_and_the_computing_stream_waits_for_its_result(cuda: FakeCuda):
    stream = SideStream(torch.device("cuda", 0), cuda)

    def chain() -> Tensor:
        assert not torch.is_grad_enabled()
        cuda.log.append(f"chain on {cuda.current.name}")
        return torch.ones(1)

    coming = stream.post(chain)
    assert cuda.log == ["side waits for main", "chain on side", "side records event 0"]
    del cuda.log[:]
    assert coming.wait() == 1
    assert cuda.log == ["main waits for event 0 of side"]
    del cuda.log[:]
    stream.finish()
    assert cuda.log == ["main waits for side"], "the host does not"


def test_tensors_of_a_chain_stay_until_the_result_of_it_or_of_a_later_one_is_waited_for(cuda: FakeCuda):
    stream, alive, coming = SideStream(torch.device("cuda", 0), cuda), [], []
    for _ in range(4):
        inputs = torch.ones(3)
        alive.append(weakref.ref(inputs))
        coming.append(stream.post(lambda held=inputs: held.sum()))
        del inputs
    for number, left in ((1, 2), (0, 2), (2, 1)):
        coming[number].wait()
        assert [ref() is not None for ref in alive] == [False] * (4 - left) + [True] * left
    stream.finish()
    assert not any(ref() is not None for ref in alive)


def test_runs_share_one_stream_of_their_device(cuda: FakeCuda):
    device = torch.device("cuda", 0)
    for _ in range(3):
        SideStream(device, cuda)
    assert cuda.made == [(device, -1)], "with high priority"


def test_an_error_on_a_stream_is_raised_where_it_is_posted(cuda: FakeCuda):
    stream = SideStream(torch.device("cuda", 0), cuda)
    with pytest.raises(RuntimeError, match="size"):
        stream.post(lambda: torch.ones(2) @ torch.ones(3))


def test_the_device_decides(monkeypatch: pytest.MonkeyPatch):
    assert isinstance(collectives_on(CPU), Worker)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: object())
    assert isinstance(collectives_on(torch.device("cuda", 5)), SideStream)


# --- their group --------------------------------------------------------------------------------------------------

PIPELINES = [[0, 2], [3, 1]]


def _group_body() -> tuple[list[int], list[tuple[Any, ...]], float]:
    asked: list[tuple[Any, ...]] = []

    def new_group(ranks: list[int], **named: Any) -> dist.ProcessGroup:
        asked.append((ranks, named.pop("timeout"), named.pop("pg_options"), named.pop("group_desc")))
        return dist.new_group(ranks, **named)

    limit = timedelta(seconds=9)
    group = make_collective_group(PIPELINES, timeout=limit, options=lambda: "options", new_group=new_group)
    worker, word = Worker(), torch.tensor([1.0 + dist.get_rank()])

    def chain() -> Tensor:
        dist.all_reduce(word, group=group)
        return word

    total = worker.post(chain).wait().item()
    worker.finish()
    return dist.get_process_group_ranks(group), asked, total


def test_there_is_a_group_of_each_pipeline_and_every_process_makes_all():
    found = run_ranks(4, _group_body)
    asked = [(ranks, timedelta(seconds=9), "options", "pipeline collectives") for ranks in PIPELINES]
    for rank, (members, told, total) in enumerate(found):
        (own,) = [pipeline for pipeline in PIPELINES if rank in pipeline]
        assert sorted(members) == sorted(own) and told == asked
        assert total == sum(each + 1 for each in own)


def _refused_body() -> str:
    with pytest.raises(ValueError) as caught:
        make_collective_group([[1]] if dist.get_rank() == 0 else [[1], [1]])
    return str(caught.value)


def test_a_process_must_be_in_one_pipeline():
    assert run_ranks(2, _refused_body) == [
        "global rank 0 is in 0 of the pipelines [[1]]; it must be in one",
        "global rank 1 is in 2 of the pipelines [[1], [1]]; it must be in one",
    ]
