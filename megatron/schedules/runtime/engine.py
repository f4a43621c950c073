"""The engine: runs one rank's program, knowing nothing of how it was made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter

from torch import Tensor

from megatron.schedules.programs.program import (
    COLLECTIVES,
    RECEIVES,
    SENDS,
    Action,
    Instruction,
    Op,
    Program,
    ProgramError,
    Result,
    Slot,
)
from megatron.schedules.runtime.frame_stack import with_frame_room
from megatron.schedules.runtime.position import End, PositionTracker
from megatron.schedules.runtime.stage_interface import Stages
from megatron.schedules.runtime.transport import Pending, Transport
from megatron.schedules.schedule.kinds import Kind

Handler = Callable[[Instruction], None]


class Observer:
    """Notified of every action as it begins and ends on the host (a device may still be computing)."""

    def began(self, action: Action) -> None:
        """The host begins with ``action``."""

    def arrived(self) -> None:
        """The awaited input of the current action has arrived. Not called if nothing was awaited."""

    def ended(self, action: Action) -> None:
        """The host has queued all of ``action`` on the device."""


@with_frame_room
def run(
    program: Program,
    stages: Stages,
    transport: Transport,
    observers: Sequence[Observer] = (),
    tracker: PositionTracker | None = None,
) -> None:
    """Runs ``program`` once: all its passes on ``stages``, all its messages through ``transport``.

    A tensor between two passes of this rank is handed on without a copy. Returns when every send and every collective
    has completed. ``tracker`` is told of every step.

    Raises:
        ProgramError: :func:`.checker.check` would refuse the program, or the stages break their contract.
        Exception: whatever a stage or the transport raises, with a note that names the rank and the action.
    """
    tracker = tracker or PositionTracker()
    mailbox = _Mailbox((tracker, *observers))
    handle = _handlers(program, stages, transport, mailbox)
    tracker.begin(program)
    try:
        for instruction in program.instructions:
            tracker.reach(instruction)
            for observer in observers:
                observer.began(instruction.action)
            handle[instruction.action.op](instruction)
            for observer in observers:
                observer.ended(instruction.action)
        tracker.reach(End.SENDS)
        transport.finish()
        mailbox.check_empty()
        tracker.reach(End.AFTER)
    except Exception as error:
        step = tracker.host.step if tracker.host is not None else None
        at = f"at {step.action}" if isinstance(step, Instruction) else "at the end of the program"
        error.add_note(f"on pipeline rank {program.rank} of {program.placement.ranks}, {at}")
        raise


def _handlers(program: Program, stages: Stages, transport: Transport, mailbox: _Mailbox) -> Mapping[Kind | Op, Handler]:
    """Returns a handler for each kind of action."""

    work: Callable[[Action], tuple[int, int]] = itemgetter(1, 2)  # stage and microbatch

    def forward(instruction: Instruction) -> None:
        stage, microbatch = work(instruction.action)
        split, recompute = program.splits(stage, microbatch), program.recomputes(stage, microbatch)
        output = stages.forward(stage, microbatch, mailbox.take(instruction), split=split, recompute=recompute)
        mailbox.put(instruction, output)

    def backward(run: Callable[[int, int, Tensor | None], Tensor | None], instruction: Instruction) -> None:
        mailbox.put(instruction, run(*work(instruction.action), mailbox.take(instruction)))

    def send(instruction: Instruction) -> None:
        assert instruction.action.peer is not None
        transport.send(instruction.action.peer, mailbox.require(instruction))

    def receive(instruction: Instruction) -> None:
        assert instruction.action.peer is not None
        mailbox.expect(instruction, transport.receive(instruction.action.peer))

    def collective(instruction: Instruction) -> None:
        operation = stages.collective(Op(instruction.action.op), instruction.action.microbatch)
        mailbox.expect(instruction, transport.collective(operation))

    return {
        Kind.F: forward,
        Kind.B: lambda instruction: backward(stages.backward, instruction),
        Kind.I: lambda instruction: backward(stages.backward_input, instruction),
        Kind.W: lambda instruction: stages.backward_weight(*work(instruction.action)),
        Kind.R: lambda instruction: stages.recompute_forward(*work(instruction.action)),
        Kind.O: lambda instruction: stages.offload(*work(instruction.action)),
        Kind.L: lambda instruction: stages.load(*work(instruction.action)),
        Kind.S: lambda instruction: stages.output_part(*work(instruction.action), mailbox.require(instruction)),
        Kind.T: lambda instruction: stages.output_weight(*work(instruction.action), mailbox.require(instruction)),
        Op.ADD: lambda instruction: stages.add_embedding(instruction.action.microbatch, mailbox.require(instruction)),
        Op.REDUCE: lambda instruction: stages.reduce_gradients(instruction.action.stage),
        **dict.fromkeys(SENDS, send),
        **dict.fromkeys(RECEIVES, receive),
        **dict.fromkeys(COLLECTIVES, collective),
    }


class _Mailbox:
    """The tensors between this rank's passes and messages, each put once and taken once.

    Args:
        watching: told when an awaited tensor has arrived.
    """

    def __init__(self, watching: Sequence[PositionTracker | Observer]) -> None:
        self._watching = watching
        self._held: dict[Slot, Tensor | Pending] = {}

    def put(self, instruction: Instruction, result: Tensor | None) -> None:
        """Stores the result of a pass for its user; drops a result without a user."""
        if instruction.filled is None:
            return
        if result is None and instruction.filled.result is Result.GRADIENT:
            _, stage, microbatch, _ = instruction.action
            raise ProgramError(
                f"the backward of stage {stage}, microbatch {microbatch} gave its input no gradient, and stage "
                f"{instruction.filled.stage} waits for it: the stage's output does not depend on its input through "
                "autograd, as where a forward runs under torch.no_grad() or detaches its result; to freeze layers, set "
                "requires_grad=False on their parameters instead"
            )
        if result is None:
            raise ProgramError(f"{instruction.action} returned nothing, and it has to give {instruction.filled}")
        self._held[instruction.filled] = result.detach()

    def expect(self, instruction: Instruction, pending: Pending) -> None:
        """Stores a posted receive or collective for its user, if it has one."""
        if instruction.filled is not None:
            self._held[instruction.filled] = pending

    def take(self, instruction: Instruction) -> Tensor | None:
        """Waits for the input of ``instruction`` and returns it; None if it has no input."""
        if instruction.needed is None:
            return None
        held = self._held.pop(instruction.needed, None)
        if held is None:
            raise ProgramError(f"{instruction.action} needs {instruction.needed}, which is not there")
        if isinstance(held, Tensor):
            return held
        tensor = held.wait()
        for observer in self._watching:
            observer.arrived()
        return tensor

    def require(self, instruction: Instruction) -> Tensor:
        """Works like :meth:`take` for an instruction that always has an input."""
        tensor = self.take(instruction)
        if tensor is None:
            raise ProgramError(f"{instruction.action} needs the result of a collective that its program does not have")
        return tensor

    def check_empty(self) -> None:
        """Raises ProgramError where a tensor was not taken."""
        if self._held:
            left = ", ".join(map(str, list(self._held)[:4]))
            raise ProgramError(f"{len(self._held)} tensors were made or received and never used: {left}")
