"""The engine: carries out one rank's program, knowing nothing of how it was made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor

from megatron.schedules.planning.kinds import Kind
from megatron.schedules.runtime.program import (
    Action,
    Op,
    Program,
    ProgramError,
    Slot,
    Step,
)
from megatron.schedules.runtime.stages import Stages
from megatron.schedules.runtime.transport import Pending, Transport

Handler = Callable[[Step], None]


class Observer(Protocol):
    """Told of every action as it begins and ends on the host (a device may still be computing)."""

    def began(self, action: Action) -> None: ...

    def ended(self, action: Action) -> None: ...


def run(program: Program, stages: Stages, transport: Transport, observer: Observer | None = None) -> None:
    """Carry out ``program`` once: all its passes on ``stages``, all its messages through ``transport``.

    A tensor between two passes of this rank is handed on as it is, nothing is copied. Returns when every send
    has completed.

    Raises:
        ProgramError: where a pass has no input, returns no output although another stage needs it, or where
            something is left over at the end: all signs of a program that :func:`.check.check` would refuse,
            or of stages that do not keep their contract.
        Exception: whatever a stage or the transport raises, at once, with a note naming the rank and the
            action.
    """
    mailbox = _Mailbox()
    handle = _handlers(program, stages, transport, mailbox)
    if observer is not None:
        handle = _observed(handle, observer)
    step: Step | None = None
    try:
        for step in program.steps:
            handle[step.action.op](step)
        step = None
        transport.finish()
        mailbox.check_empty()
    except Exception as error:
        at = "at the end of the program" if step is None else f"at {step.action}"
        error.add_note(f"on pipeline rank {program.rank} of {program.placement.ranks}, {at}")
        raise


def _observed(handle: Mapping[Kind | Op, Handler], observer: Observer) -> dict[Kind | Op, Handler]:
    """``handle`` with ``observer`` told before and after."""

    def told(handler: Handler) -> Handler:
        def observed(step: Step) -> None:
            observer.began(step.action)
            handler(step)
            observer.ended(step.action)

        return observed

    return {op: told(handler) for op, handler in handle.items()}


def _handlers(program: Program, stages: Stages, transport: Transport, mailbox: _Mailbox) -> dict[Kind | Op, Handler]:
    """One handler for each kind of action."""

    def forward(step: Step) -> None:
        _, stage, microbatch, _ = step.action
        split = program.splits(stage, microbatch)
        mailbox.put(step, stages.forward(stage, microbatch, mailbox.take(step), split=split))

    def whole_backward(step: Step) -> None:
        _, stage, microbatch, _ = step.action
        mailbox.put(step, stages.backward(stage, microbatch, mailbox.take(step)))

    def input_backward(step: Step) -> None:
        _, stage, microbatch, _ = step.action
        mailbox.put(step, stages.backward_input(stage, microbatch, mailbox.take(step)))

    def weight_backward(step: Step) -> None:
        _, stage, microbatch, _ = step.action
        stages.backward_weight(stage, microbatch)

    def send(step: Step) -> None:
        message, peer = mailbox.take(step), step.action.peer
        assert peer is not None and message is not None
        transport.send(peer, message)

    def receive(step: Step) -> None:
        peer = step.action.peer
        assert peer is not None
        mailbox.expect(step, transport.receive(peer))

    def reduce(step: Step) -> None:
        stages.reduce_gradients(step.action.stage)

    return {
        Kind.F: forward,
        Kind.I: input_backward,
        Kind.W: weight_backward,
        Kind.B: whole_backward,
        Op.SEND_F: send,
        Op.SEND_B: send,
        Op.RECV_F: receive,
        Op.RECV_B: receive,
        Op.REDUCE: reduce,
    }


class _Mailbox:
    """The tensors between this rank's passes and messages, each put once and taken once."""

    def __init__(self) -> None:
        self._held: dict[Slot, Tensor | Pending] = {}

    def put(self, step: Step, result: Tensor | None) -> None:
        """Keep the result of a pass for whoever needs it; a result that nobody needs is dropped."""
        if step.filled is None:
            return
        if result is None:
            raise ProgramError(f"{step.action} gave no result, and it is {step.filled}")
        self._held[step.filled] = result.detach()

    def expect(self, step: Step, pending: Pending) -> None:
        """Keep what a posted receive will bring."""
        assert step.filled is not None
        self._held[step.filled] = pending

    def take(self, step: Step) -> Tensor | None:
        """What ``step`` needs, waited for where it comes from another rank; None where it needs nothing."""
        if step.needed is None:
            return None
        held = self._held.pop(step.needed, None)
        if held is None:
            raise ProgramError(f"{step.action} needs {step.needed}, which is not there")
        return held if isinstance(held, Tensor) else held.wait()

    def check_empty(self) -> None:
        if self._held:
            left = ", ".join(map(str, list(self._held)[:4]))
            raise ProgramError(f"{len(self._held)} tensors were made or received and never used: {left}")
