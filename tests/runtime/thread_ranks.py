"""Ranks as threads of one process: an in-memory transport for trying many programs quickly."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue

from torch import Tensor

from megatron.schedules.programs.program import Channel, Program
from megatron.schedules.runtime.collectives import Chain, Pending, Worker
from megatron.schedules.runtime.transport import Transport


class ThreadTransport:
    """Messages of one rank through queues shared by all threads."""

    def __init__(
        self,
        rank: int,
        queues: dict[Channel, SimpleQueue[Tensor]],
        patience: float = 20,
        worker: Worker | None = None,
    ) -> None:
        self._rank, self._queues, self._patience = rank, queues, patience
        self._posted: dict[Channel, list[_Receive]] = {}
        self._collectives = worker or _worker()

    def send(self, peer: int, tensor: Tensor) -> None:
        self._queues[Channel(self._rank, peer)].put(tensor.clone())

    def receive(self, peer: int) -> _Receive:
        channel = Channel(peer, self._rank)
        receive = _Receive(self._posted.setdefault(channel, []), self._queues[channel], self._patience)
        self._posted[channel].append(receive)
        return receive

    def collective(self, chain: Chain) -> Pending:
        return self._collectives.post(chain)

    def finish(self) -> None:
        self._collectives.finish()
        assert not any(self._posted.values()), "a posted receive was not used"


def _worker() -> Worker:
    """One that does not end the process of the tests."""
    return Worker(end=print)


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


class ThreadTalk:
    """What all ranks have, one exchange after another: the k-th call of one rank matches the k-th of all others."""

    def __init__(self, ranks: int, patience: float = 20) -> None:
        self._barrier = threading.Barrier(ranks)
        self._brought: list[Tensor | None] = [None] * ranks
        self._patience = patience

    def gather(self, rank: int, tensor: Tensor) -> list[Tensor]:
        """The tensors that the ranks brought to this exchange, in their order."""
        self._brought[rank] = tensor.clone()
        self._barrier.wait(self._patience)
        found = [each for each in self._brought if each is not None]
        self._barrier.wait(self._patience)
        return found


def run_threads(programs: Sequence[Program], body: Callable[[Program, Transport], None]) -> None:
    """Run ``body(program, transport)`` for every rank at once; raises the first rank's error, if any."""
    made = transports(programs)
    errors = errors_in_threads(programs, lambda program: body(program, made[program.rank]))
    if errors:
        raise errors[0]


def transports(
    programs: Sequence[Program], patience: float = 20, worker: Callable[[], Worker] | None = None
) -> list[ThreadTransport]:
    """One for each rank, joined to each other; with a ``worker`` for its collectives."""
    pairs = [Channel(a, b) for a in range(len(programs)) for b in range(len(programs))]
    queues: dict[Channel, SimpleQueue[Tensor]] = {pair: SimpleQueue() for pair in pairs}
    return [ThreadTransport(program.rank, queues, patience, (worker or _worker)()) for program in programs]


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
