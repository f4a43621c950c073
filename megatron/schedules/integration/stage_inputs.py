"""Compares what layers take from the batch between the stages of a pipeline, in a model's first call.

A forward step that reads its samples on the first and the last stage alone has no mask for the stages between them.
Megatron's layers then attend to all earlier tokens, and another model is trained.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.moe.router import Router
from torch import Tensor
from torch.nn import Module

from megatron.schedules.integration.refuse import refuse
from megatron.schedules.runtime.control_messages import of_all_ranks

_MASK, _PADDING, _PACKED = "attention_mask", "padding_mask", "packed_seq_params"
# Types of attention for which Transformer Engine reads a mask.
_READS_MASKS = ("padding", "padding_causal", "arbitrary")


class Taken(NamedTuple):
    """Tensors that one forward of a stage's layers took from the batch.

    Args:
        given: inputs that change results.
        lacking: inputs that the layers read and that were None.
    """

    given: frozenset[str]
    lacking: frozenset[str]


Blocks = Mapping[tuple[str, int], Sequence[Taken]]
"""By the name of a block of layers in the model and by stage: each of its forwards."""


def difference(ranks: Sequence[Blocks]) -> str:
    """Returns the refusal for an input that one stage takes from a batch and another lacks; empty if there is none."""
    blocks = sorted(item for rank in ranks for item in rank.items())
    giving: dict[tuple[str, int, str], int] = {}  # stages, by block, forward and input
    for (block, stage), forwards in blocks:
        for at, taken in enumerate(forwards):  # every stage reads its samples in the same order
            for name in taken.given:
                giving.setdefault((block, at, name), stage)
    for (block, stage), forwards in blocks:
        for at, taken in enumerate(forwards):
            for name in sorted(taken.lacking):
                if (other := giving.get((block, at, name))) is not None:
                    return (
                        f"the forward step passes {name} to the layers of stage {other} and none to those of stage "
                        f"{stage}, which read it too: pass it on every stage (docs/loops.md), or on none"
                    )
    return ""


class StageInputs:
    """Compares the stages' inputs once, in the first call with a model. Collective over its pipeline.

    Args:
        stages: numbers of this rank's stages, one for each chunk.
        group: the pipeline's ranks.
        masks_documents: whether masks depend on data, even if the first ones do not show it.
    """

    def __init__(self, stages: Sequence[int], group: dist.ProcessGroup, *, masks_documents: bool) -> None:
        self._stages, self._group, self._masks_documents = stages, group, masks_documents
        self._compared = False

    @contextmanager
    def compared(self, chunks: Sequence[Module]) -> Iterator[None]:
        """Around the run of a call. Ends the process with status 2 and one line if the stages' inputs differ."""
        if self._compared:
            yield
            return
        self._compared = True
        blocks = {
            (name, stage): _Block(module, masks_documents=self._masks_documents)
            for stage, chunk in zip(self._stages, chunks, strict=True)
            for name, module in chunk.named_modules()
            if hasattr(module, "set_input_tensor") and isinstance(getattr(module, "layers", None), torch.nn.ModuleList)
        }
        try:
            yield
        finally:
            for block in blocks.values():
                block.handle.remove()
        if fault := difference(of_all_ranks({key: block.taken() for key, block in blocks.items()}, self._group)):
            refuse(fault)


class _Block:
    """A stage's block of layers, and what its forwards were given."""

    def __init__(self, module: Module, *, masks_documents: bool) -> None:
        self._bind = inspect.signature(module.forward).bind_partial
        self._reads, causal = _read_by(module)
        self._changes: dict[str, Callable[[Any], Tensor | bool]] = {
            _MASK: (lambda mask: True) if masks_documents or not causal else _is_not_causal,
            _PADDING: lambda mask: mask.any(),
            _PACKED: lambda bounds: True,
        }
        self._seen: list[tuple[dict[str, Tensor | bool], frozenset[str]]] = []
        self.handle = module.register_forward_pre_hook(self._look, with_kwargs=True)

    def _look(self, module: Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Before a forward; does not wait for the device."""
        inputs = self._bind(*args, **kwargs).arguments
        given = {name: changes(inputs[name]) for name, changes in self._changes.items() if inputs.get(name) is not None}
        instead = {_MASK} if _PACKED in given else set()
        self._seen.append((given, self._reads - given.keys() - instead))

    def taken(self) -> list[Taken]:
        """Returns the tensors that its forwards took. Waits for the device."""
        return [Taken(frozenset(name for name in given if given[name]), lacking) for given, lacking in self._seen]


def _read_by(block: Module) -> tuple[frozenset[str], bool]:
    """Returns the inputs that layers of ``block`` read, and whether all its attention is causal without a mask."""
    names, causal = {_PACKED} if len(block.layers) else set(), True  # type: ignore[arg-type]
    for module in block.modules():
        if isinstance(module, Router):
            names.add(_PADDING)
        elif isinstance(module, DotProductAttention):
            softmax = module.scale_mask_softmax
            if getattr(softmax, "window_size", None) is None:  # otherwise it makes its own mask
                names.add(_MASK)
                causal = causal and softmax.attn_mask_type is AttnMaskType.causal
        elif getattr(getattr(module, "attn_mask_type", None), "name", "") in _READS_MASKS:
            names.add(_MASK)
            causal = False
    return frozenset(names), causal


def _is_not_causal(mask: Any) -> Tensor | bool:
    """Returns whether ``mask``, shape (..., queries, keys), hides anything but later tokens, as a tensor."""
    if not isinstance(mask, Tensor):
        return True
    hidden, (queries, keys) = mask.bool(), mask.shape[-2:]
    later = torch.ones(queries, keys, dtype=torch.bool, device=mask.device).triu(keys - queries + 1)
    return (hidden != later).any()
