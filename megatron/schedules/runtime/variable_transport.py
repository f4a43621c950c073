"""Transport of messages whose shape the receiver does not know: the shape goes ahead of each."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable

import torch
from torch import Tensor

from megatron.schedules.runtime.transport import Channels, GroupTransport, MessageSpec, Pending


class VariableTransport:
    """The messages of one run (a :class:`.transport.Transport`), each of any shape with the spec's many dimensions.

    A send sends the shape and then the tensor, each on channels of its own. A receive posts that of the shape; the
    tensor's is posted when a pass waits for it, after those of the channel's earlier messages. So shapes meet shapes
    and tensors meet tensors in the channel's order, in whatever order passes wait.

    Why nothing hangs that the checker (:mod:`.check`) lets through: a rank stops only at a pass, for message k of a
    channel. There it waits for shapes 0 to k, which come as soon as the sender has posted send k, as the checker asks;
    it posts the receives of all tensors up to k, and waits for tensor k, whose sender waits for nothing else. A message
    is through when its sender has posted it and its receiver has come to a pass that uses it or a later one of the
    channel: ``receives_at_use`` of the checker. Every message is used, so every tensor's receive is posted before its
    receiver ends, and no send stays open.

    Shapes travel between hosts, over gloo: a sender's host knows a shape long before its GPU has the tensor, and no GPU
    has to stop for a receiver's host to read it. So hosts wait for hosts only. A tensor's transfer starts when the
    receiver's GPU has done the passes queued before: it does not overlap them, as one of known shape does.

    Args:
        channels: this process's groups for the tensors.
        shapes: its groups for the shapes, of the same channels, made with the backend gloo.
        spec: dtype, device and number of dimensions of every message; the dimensions themselves do not count.
    """

    def __init__(self, channels: Channels, shapes: Channels, spec: MessageSpec) -> None:
        self._spec = spec
        self._tensors = GroupTransport(channels, spec)
        self._shapes = GroupTransport(shapes, MessageSpec((len(spec.shape),), torch.int64, torch.device("cpu")))
        self._waiting: defaultdict[int, deque[_Announced]] = defaultdict(deque)

    def send(self, peer: int, tensor: Tensor) -> None:
        """See :meth:`.transport.Transport.send`.

        Raises:
            ValueError: where ``tensor`` is not of the spec's dtype or number of dimensions.
        """
        dimensions, dtype = len(self._spec.shape), self._spec.dtype
        if tensor.dim() != dimensions or tensor.dtype != dtype:
            found = f"{tensor.dtype} {tuple(tensor.shape)}"
            raise ValueError(f"a message of {dtype} in {dimensions} dimensions was agreed, not {found}")
        self._shapes.send(peer, torch.tensor(tensor.shape))
        self._tensors.post_send(peer, tensor)

    def receive(self, peer: int) -> Pending:
        """See :meth:`.transport.Transport.receive`."""
        message = _Announced(self._shapes.receive(peer), lambda until: self._post_until(peer, until))
        self._waiting[peer].append(message)
        return message

    def finish(self) -> None:
        """See :meth:`.transport.Transport.finish`. Raises what a send raised."""
        self._shapes.finish()
        self._tensors.finish()

    def _post_until(self, peer: int, message: _Announced) -> None:
        waiting = self._waiting[peer]
        while message.tensor is None:
            first = waiting.popleft()
            first.tensor = self._tensors.post_receive(peer, first.shape.wait().tolist())


class _Announced:
    """A message whose shape's receive is posted, and its tensor's once ``post`` was called on it or a later one."""

    def __init__(self, shape: Pending, post: Callable[[_Announced], None]) -> None:
        self.shape = shape
        self.tensor: Pending | None = None
        self._post = post

    def wait(self) -> Tensor:
        self._post(self)
        assert self.tensor is not None
        return self.tensor.wait()
