"""Sends the results of a call to the rank where training loops read them, and the losses of multi-token prediction too.

Loops on megatron-core read losses and other results on the last pipeline rank. In a V the output layer is on the first.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from torch import Tensor

_SUMS = ("loss_values", "correct_values", "total_values")


class _Form(NamedTuple):
    """Results without their tensors.

    Args:
        pickled: everything else; its k-th persistent object is the k-th tensor.
        tensors: shape and type of each tensor.
    """

    pickled: bytes
    tensors: tuple[tuple[tuple[int, ...], torch.dtype], ...]

    @property
    def sizes(self) -> list[int]:
        """Bytes of each tensor."""
        return [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in self.tensors]


class ResultRelay:
    """Sends results of any nesting from one rank of a pipeline to all its ranks.

    Values of tensors on the device go as one broadcast of bytes. All else is pickled: dictionaries, lists, named
    tuples, numbers, and tensors elsewhere. It is sent only when it has changed.

    Args:
        group: the pipeline's process group.
        source: the rank in it that has the results.
    """

    def __init__(self, group: dist.ProcessGroup, source: int) -> None:
        self._group, self._source = group, source
        self._is_source = dist.get_rank(group) == source
        self._form: _Form | None = None

    def __call__(self, results: Any, device: torch.device, *, alike: bool = False) -> Any:
        """Returns the source's results, on every rank.

        Args:
            results: any picklable object; only that of the source counts.
            device: device of the broadcasts.
            alike: whether only values of tensors differ from the last results. Then no host waits.

        Raises:
            RuntimeError: more differs from the last results.
        """
        form, tensors = _taken_apart(results, device) if self._is_source else (None, [])
        if not alike:
            self._exchange(form, device)
        elif self._form is None or (self._is_source and form != self._form):
            raise RuntimeError(
                "a CUDA graph of a whole iteration repeats the results of the forward step that are no tensors, and "
                "these differ between iterations: return them as tensors, or leave out --cuda-graph-impl"
            )
        assert self._form is not None
        if self._is_source:
            packed = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors] or [_empty(0, device)])
        else:
            packed = _empty(sum(self._form.sizes), device)
        dist.broadcast(packed, group_src=self._source, group=self._group)
        return results if self._is_source else _put_together(self._form, packed)

    def _exchange(self, form: _Form | None, device: torch.device) -> None:
        """Sends the source's form to all ranks if it has changed; hosts wait for the answer."""
        changed = torch.tensor([self._is_source and form != self._form], dtype=torch.int, device=device)
        dist.broadcast(changed, group_src=self._source, group=self._group)
        if changed.item():
            message: list[Any] = [form]
            dist.broadcast_object_list(message, group_src=self._source, group=self._group)
            self._form = message[0]


def _empty(size: int, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)


def _taken_apart(results: Any, device: torch.device) -> tuple[_Form, list[Tensor]]:
    """Returns the form of ``results``, and their tensors on ``device``."""
    file = io.BytesIO()
    pickler = _Pickler(file, device)
    pickler.dump(results)
    shapes = tuple((tuple(tensor.shape), tensor.dtype) for tensor in pickler.tensors)
    return _Form(file.getvalue(), shapes), pickler.tensors


class _Pickler(pickle.Pickler):
    """Pickles all but plain tensors on a device. Tensors of other classes are made of plain ones."""

    def __init__(self, file: io.BytesIO, device: torch.device) -> None:
        super().__init__(file)
        self._type = device.type
        self.tensors: list[Tensor] = []

    def persistent_id(self, value: Any) -> int | None:
        if type(value) not in (Tensor, torch.nn.Parameter) or value.device.type != self._type:
            return None
        if value.layout is not torch.strided or value.is_nested:
            return None
        self.tensors.append(value.detach().contiguous())
        return len(self.tensors) - 1


class _Unpickler(pickle.Unpickler):
    """Reads what :class:`_Pickler` wrote, with ``tensors`` in place of those that it left out."""

    def __init__(self, pickled: bytes, tensors: Sequence[Tensor]) -> None:
        super().__init__(io.BytesIO(pickled))
        self._tensors = tensors

    def persistent_load(self, number: int) -> Tensor:
        return self._tensors[number]


def _put_together(form: _Form, packed: Tensor) -> Any:
    """Returns the results with the tensors in ``packed``."""
    parts: Sequence[Tensor] = packed.split(form.sizes)
    # Cloned, because a part need not begin where its type can.
    tensors = [
        part.clone().view(dtype).reshape(shape) for part, (shape, dtype) in zip(parts, form.tensors, strict=True)
    ]
    return _Unpickler(form.pickled, tensors).load()


def hand_over_metrics(group: dist.ProcessGroup, source: int, layers: int) -> None:
    """Moves the sums of multi-token prediction since the last report from ``source`` to the last pipeline rank.

    Stock keeps them where they are computed, with the output layer, and reports those of the last rank.

    Args:
        group: the pipeline's process group; all of it must call.
        source: the rank in it that computes the losses.
        layers: how many tokens ahead are predicted, ``--mtp-num-layers``.
    """
    tracker, last = MTPLossLoggingHelper.tracker, group.size() - 1
    sums = torch.zeros(len(_SUMS), layers, device="cuda")
    if group.rank() == source:
        for row, name in zip(sums, _SUMS, strict=True):
            row.copy_(tracker[name])
            tracker[name].zero_()
    dist.broadcast(sums, group_src=source, group=group)
    if group.rank() == last:
        for row, name in zip(sums, _SUMS, strict=True):
            if name not in tracker:
                tracker[name] = torch.zeros_like(row)
            tracker[name] += row  # in place, because a CUDA graph adds to the same memory again
        tracker["reduce_group"] = None
        tracker["avg_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
