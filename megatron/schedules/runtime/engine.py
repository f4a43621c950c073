"""The engine: carries out one rank's program, knowing nothing of how it was made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from megatron.schedules.runtime.position import End, Place
from megatron.schedules.runtime.program import (
    Action,
    Instruction,
    Op,
    Program,
    ProgramError,
    Slot,
)
from megatron.schedules.runtime.stage_interface import Stages
from megatron.schedules.runtime.transport import Pending, Transport
from megatron.schedules.schedule.kinds import Kind

Handler = Callable[[Instruction], None]


class Observer(Protocol):
    """Told of every action as it begins and ends on the host (a device may still be computing)."""

    def began(self, action: Action) -> None: ...

    def arrived(self) -> None:
        """What the action that began last has waited for is there; told only where something was waited for."""
        ...

    def ended(self, action: Action) -> None: ...


def run(
    program: Program,
    stages: Stages,
    transport: Transport,
    observers: Sequence[Observer] = (),
    place: Place | None = None,
) -> None:
    """Carry out ``program`` once: all its passes on ``stages``, all its messages through ``transport``.

    A tensor between two passes of this rank is handed on as it is, nothing is copied. Returns when every send and
    every collective has completed. ``place`` says at every moment where this is.

    Raises:
        ProgramError: where a pass has no input, returns no output although another stage needs it, or where
            something is left over at the end: all signs of a program that :func:`.check.check` would refuse,
            or of stages that do not keep their contract.
        Exception: whatever a stage or the transport raises, at once, with a note naming the rank and the
            action.
    """
    place = place or Place()
    mailbox = _Mailbox((place, *observers))
    handle = _handlers(program, stages, transport, mailbox)
    for observer in observers:
        handle = _observed(handle, observer)
    instruction: Instruction | None = None
    place.begin(program)
    try:
        for instruction in program.instructions:
            place.reach(instruction)
            handle[instruction.action.op](instruction)
        instruction = None
        place.reach(End.SENDS)
        transport.finish()
        mailbox.check_empty()
        place.reach(End.AFTER)
    except Exception as error:
        at = "at the end of the program" if instruction is None else f"at {instruction.action}"
        error.add_note(f"on pipeline rank {program.rank} of {program.placement.ranks}, {at}")
        raise


def _observed(handle: Mapping[Kind | Op, Handler], observer: Observer) -> dict[Kind | Op, Handler]:
    """``handle`` with ``observer`` told before and after."""

    def told(handler: Handler) -> Handler:
        def observed(instruction: Instruction) -> None:
            observer.began(instruction.action)
            handler(instruction)
            observer.ended(instruction.action)

        return observed

    return {op: told(handler) for op, handler in handle.items()}


def _handlers(program: Program, stages: Stages, transport: Transport, mailbox: _Mailbox) -> dict[Kind | Op, Handler]:
    """One handler for each kind of action."""

    def forward(instruction: Instruction) -> None:
        _, stage, microbatch, _ = instruction.action
        split, again = program.splits(stage, microbatch), program.recomputes(stage, microbatch)
        output = stages.forward(stage, microbatch, mailbox.take(instruction), split=split, again=again)
        mailbox.put(instruction, output)

    def recompute_forward(instruction: Instruction) -> None:
        _, stage, microbatch, _ = instruction.action
        stages.recompute_forward(stage, microbatch)

    def whole_backward(instruction: Instruction) -> None:
        _, stage, microbatch, _ = instruction.action
        mailbox.put(instruction, stages.backward(stage, microbatch, mailbox.take(instruction)))

    def input_backward(instruction: Instruction) -> None:
        _, stage, microbatch, _ = instruction.action
        mailbox.put(instruction, stages.backward_input(stage, microbatch, mailbox.take(instruction)))

    def weight_backward(instruction: Instruction) -> None:
        _, stage, microbatch, _ = instruction.action
        stages.backward_weight(stage, microbatch)

    def offload(instruction: Instruction) -> None:
        stages.offload(instruction.action.stage, instruction.action.microbatch)

    def load(instruction: Instruction) -> None:
        stages.load(instruction.action.stage, instruction.action.microbatch)

    def send(instruction: Instruction) -> None:
        message, peer = mailbox.take(instruction), instruction.action.peer
        assert peer is not None and message is not None
        transport.send(peer, message)

    def receive(instruction: Instruction) -> None:
        peer = instruction.action.peer
        assert peer is not None
        mailbox.expect(instruction, transport.receive(peer))

    def reduce(instruction: Instruction) -> None:
        stages.reduce_gradients(instruction.action.stage)

    def output_part(instruction: Instruction) -> None:
        _, stage, microbatch, _ = instruction.action
        stages.output_part(stage, microbatch, mailbox.brought(instruction))

    def output_weight(instruction: Instruction) -> None:
        _, stage, microbatch, _ = instruction.action
        stages.output_weight(stage, microbatch, mailbox.brought(instruction))

    def add(instruction: Instruction) -> None:
        stages.add_embedding(instruction.action.microbatch, mailbox.brought(instruction))

    def meet(instruction: Instruction) -> None:
        op, _, microbatch, _ = instruction.action
        pending = transport.meet(stages.meet(Op(op), microbatch))
        if instruction.filled is not None:
            mailbox.expect(instruction, pending)

    return {
        Kind.F: forward,
        Kind.I: input_backward,
        Kind.W: weight_backward,
        Kind.B: whole_backward,
        Kind.S: output_part,
        Kind.T: output_weight,
        Kind.R: recompute_forward,
        Kind.O: offload,
        Kind.L: load,
        Op.SEND_F: send,
        Op.SEND_B: send,
        Op.RECV_F: receive,
        Op.RECV_B: receive,
        Op.REDUCE: reduce,
        Op.EMBED: meet,
        Op.OUTPUT: meet,
        Op.SUM: meet,
        Op.WEIGH: meet,
        Op.EMBED_BACK: meet,
        Op.ADD: add,
    }


class _Mailbox:
    """The tensors between this rank's passes and messages, each put once and taken once.

    Args:
        watching: told when what was waited for has arrived.
    """

    def __init__(self, watching: Sequence[Place | Observer]) -> None:
        self._watching = watching
        self._held: dict[Slot, Tensor | Pending] = {}

    def put(self, instruction: Instruction, result: Tensor | None) -> None:
        """Keep the result of a pass for whoever needs it; a result that nobody needs is dropped."""
        if instruction.filled is None:
            return
        if result is None:
            raise ProgramError(f"{instruction.action} gave no result, and it is {instruction.filled}")
        self._held[instruction.filled] = result.detach()

    def expect(self, instruction: Instruction, pending: Pending) -> None:
        """Keep what a posted receive or collective will bring."""
        assert instruction.filled is not None
        self._held[instruction.filled] = pending

    def take(self, instruction: Instruction) -> Tensor | None:
        """What ``instruction`` needs, waited for where it comes from another rank; None where it needs nothing."""
        if instruction.needed is None:
            return None
        held = self._held.pop(instruction.needed, None)
        if held is None:
            raise ProgramError(f"{instruction.action} needs {instruction.needed}, which is not there")
        if isinstance(held, Tensor):
            return held
        tensor = held.wait()
        for each in self._watching:
            each.arrived()
        return tensor

    def brought(self, instruction: Instruction) -> Tensor:
        """What ``instruction``, which needs something, needs."""
        tensor = self.take(instruction)
        if tensor is None:
            raise ProgramError(f"{instruction.action} needs what no collective of its program brings")
        return tensor

    def check_empty(self) -> None:
        if self._held:
            left = ", ".join(map(str, list(self._held)[:4]))
            raise ProgramError(f"{len(self._held)} tensors were made or received and never used: {left}")
