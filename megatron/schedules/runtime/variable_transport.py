"""Transport of messages whose shape the receiver does not know: the shape goes ahead of each."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.schedules.runtime.collectives import Chain
from megatron.schedules.runtime.transport import Channels, GroupTransport, MessageSpec, Pending


class VariableTransport:
    """The messages of one run (a :class:`.transport.Transport`), each of any shape with the spec's many dimensions.

    A send sends the shape and then the tensor, each on channels of its own. A receive waits for the shape and then
    posts that of the tensor. So a rank's host waits where it posts a receive, for the host that posts the send: the
    checker (:mod:`.check`) has proved that this ends.

    Shapes travel between hosts, over gloo: a sender's host knows a shape long before its GPU has the tensor, and no GPU
    has to stop for a receiver's host to read it.

    Args:
        channels: this process's groups for the tensors.
        shapes: its groups for the shapes, of the same channels, made with the backend gloo.
        spec: dtype, device and number of dimensions of every message; the dimensions themselves do not count.
    """

    def __init__(self, channels: Channels, shapes: Channels, spec: MessageSpec) -> None:
        self._spec = spec
        self._tensors = GroupTransport(channels, spec)
        self._shapes = GroupTransport(shapes, MessageSpec((len(spec.shape),), torch.int64, torch.device("cpu")))

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
        return self._tensors.post_receive(peer, self._shapes.receive(peer).wait().tolist())

    def meet(self, chain: Chain) -> Pending:
        """See :meth:`.transport.Transport.meet`: a chain knows its own shapes."""
        return self._tensors.meet(chain)

    def finish(self) -> None:
        """See :meth:`.transport.Transport.finish`."""
        self._shapes.finish()
        self._tensors.finish()
