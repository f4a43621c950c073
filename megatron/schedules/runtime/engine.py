"""The engine: carries out one rank's program, knowing nothing of how it was made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from megatron.schedules.runtime.program import (
    Action,
    Op,
    Program,
    ProgramError,
    Slot,
    slot_filled,
    slot_needed,
)
from megatron.schedules.runtime.stages import Stages
from megatron.schedules.runtime.transport import Pending, Transport

Handler = Callable[[Action], None]


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
    mailbox = _Mailbox(program.placement.last_stage)
    handle = _handlers(program, stages, transport, mailbox)
    step = _plain(handle) if observer is None else _observed(handle, observer)
    action: Action | None = None
    try:
        for action in program.actions:
            step(action)
        action = None
        transport.finish()
        mailbox.check_empty()
    except Exception as error:
        at = "at the end of the program" if action is None else f"at {action}"
        error.add_note(f"on pipeline rank {program.rank} of {program.placement.ranks}, {at}")
        raise


def _plain(handle: dict[Op, Handler]) -> Handler:
    def step(action: Action) -> None:
        handle[action.op](action)

    return step


def _observed(handle: dict[Op, Handler], observer: Observer) -> Handler:
    def step(action: Action) -> None:
        observer.began(action)
        handle[action.op](action)
        observer.ended(action)

    return step


def _handlers(program: Program, stages: Stages, transport: Transport, mailbox: _Mailbox) -> dict[Op, Handler]:
    """One handler for each kind of action."""

    def forward(action: Action) -> None:
        split = program.splits(action.stage, action.microbatch)
        mailbox.put(action, stages.forward(action.stage, action.microbatch, mailbox.take(action), split=split))

    def whole_backward(action: Action) -> None:
        mailbox.put(action, stages.backward(action.stage, action.microbatch, mailbox.take(action)))

    def input_backward(action: Action) -> None:
        mailbox.put(action, stages.backward_input(action.stage, action.microbatch, mailbox.take(action)))

    def weight_backward(action: Action) -> None:
        stages.backward_weight(action.stage, action.microbatch)

    def send(action: Action) -> None:
        message = mailbox.take(action)
        assert action.peer is not None and message is not None
        transport.send(action.peer, message)

    def receive(action: Action) -> None:
        assert action.peer is not None
        mailbox.expect(action, transport.receive(action.peer))

    return {
        Op.F: forward,
        Op.B: whole_backward,
        Op.I: input_backward,
        Op.W: weight_backward,
        Op.SEND_F: send,
        Op.SEND_B: send,
        Op.RECV_F: receive,
        Op.RECV_B: receive,
    }


class _Mailbox:
    """The tensors between this rank's passes and messages, each put once and taken once."""

    def __init__(self, last_stage: int) -> None:
        self._last_stage = last_stage
        self._held: dict[Slot, Tensor | Pending] = {}

    def put(self, action: Action, result: Tensor | None) -> None:
        """Keep the result of a pass for whoever needs it; a result that nobody needs is dropped."""
        slot = slot_filled(action, self._last_stage)
        if slot is None:
            return
        if result is None:
            raise ProgramError(f"{action} gave no result, and it is {slot}")
        self._held[slot] = result.detach()

    def expect(self, action: Action, pending: Pending) -> None:
        """Keep what a posted receive will bring."""
        slot = slot_filled(action, self._last_stage)
        assert slot is not None
        self._held[slot] = pending

    def take(self, action: Action) -> Tensor | None:
        """What ``action`` needs, waited for where it comes from another rank; None where it needs nothing."""
        slot = slot_needed(action, self._last_stage)
        if slot is None:
            return None
        try:
            held = self._held.pop(slot)
        except KeyError:
            raise ProgramError(f"{action} needs {slot}, which is not there") from None
        return held if isinstance(held, Tensor) else held.wait()

    def check_empty(self) -> None:
        if self._held:
            left = ", ".join(map(str, list(self._held)[:4]))
            raise ProgramError(f"{len(self._held)} tensors were made or received and never used: {left}")
