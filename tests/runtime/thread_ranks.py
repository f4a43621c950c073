"""Ranks as threads of one process: an in-memory transport for trying many programs quickly."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue

from torch import Tensor

from megatron.schedules.runtime.program import Channel, Program
from megatron.schedules.runtime.transport import Transport


class ThreadTransport:
    """Messages of one rank through queues shared by all threads."""

    def __init__(self, rank: int, queues: dict[Channel, SimpleQueue[Tensor]], patience: float = 20) -> None:
        self._rank, self._queues, self._patience = rank, queues, patience
        self._posted: dict[Channel, list[_Receive]] = {}

    def send(self, peer: int, tensor: Tensor) -> None:
        self._queues[Channel(self._rank, peer)].put(tensor.clone())

    def receive(self, peer: int) -> _Receive:
        channel = Channel(peer, self._rank)
        receive = _Receive(self._posted.setdefault(channel, []), self._queues[channel], self._patience)
        self._posted[channel].append(receive)
        return receive

    def finish(self) -> None:
        assert not any(self._posted.values()), "a posted receive was not used"


class _Receive:
    """The k-th receive gets the k-th message, whichever is waited for first."""

    def __init__(self, posted: list[_Receive], queue: SimpleQueue[Tensor], patience: float) -> None:
        self._posted, self._queue, self._patience = posted, queue, patience
        self._message: Tensor | None = None

    def wait(self) -> Tensor:
        while self._message is None:
            try:
                self._posted.pop(0)._message = self._queue.get(timeout=self._patience)
            except Empty:
                raise TimeoutError("no message came") from None
        return self._message


def run_threads(programs: Sequence[Program], body: Callable[[Program, Transport], None]) -> None:
    """Run ``body(program, transport)`` for every rank at once; raises the first rank's error, if any."""
    pairs = [Channel(a, b) for a in range(len(programs)) for b in range(len(programs))]
    queues: dict[Channel, SimpleQueue[Tensor]] = {pair: SimpleQueue() for pair in pairs}
    errors = errors_in_threads(programs, lambda program: body(program, ThreadTransport(program.rank, queues)))
    if errors:
        raise errors[0]


def errors_in_threads(programs: Sequence[Program], body: Callable[[Program], None]) -> list[Exception]:
    """Run ``body(program)`` for every rank at once, a thread each; the errors they end with."""
    errors: list[Exception] = []

    def one(program: Program) -> None:
        try:
            body(program)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=one, args=(program,), daemon=True) for program in programs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors
