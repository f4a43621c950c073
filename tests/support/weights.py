"""Parameters by their name in the whole model: the same start for any pipeline, and comparable gradients."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor

from megatron.schedules.integration.vocabulary.parts import parts_of

_DEVIATION = 0.02


def named_parameters(model: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yields every parameter of a rank's chunks, with layers numbered as in the whole model."""
    for chunk in model:
        inner = get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True)
        for name, parameter in inner.named_parameters():
            parts = name.split(".")
            if "decoder" in parts and "layers" in parts:
                at = parts.index("layers") + 1
                parts[at] = str(inner.decoder.layers[int(parts[at])].layer_number - 1)
            yield ".".join(parts), parameter


def start_equal(model: Sequence[torch.nn.Module]) -> None:
    """Initializes each weight from its own name: stock's initialization depends on the pipeline rank.

    Norms and biases start the same everywhere, and stay as they are.
    """
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    shared = {id(part.weight) for part in parts_of(model) or ()}
    for name, parameter in named_parameters(model):
        if parameter.ndim < 2:
            continue
        # Of a table that the pipeline's ranks share, this one's piece.
        pieces, own = (pipeline.size(), pipeline.rank()) if id(parameter) in shared else (1, 0)
        part = parallel_state.get_tensor_model_parallel_rank() if _is_a_part(parameter) else 0
        generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {part}".encode()))
        with torch.no_grad():
            whole = torch.randn(len(parameter) * pieces, *parameter.shape[1:], generator=generator)
            value = whole.chunk(pieces)[own].mul_(_DEVIATION)
            parameter.copy_(value)
            if hasattr(parameter, "_high_precision_init_val"):  # an FP8 weight's, which its main weight is made of
                parameter._high_precision_init_val.copy_(value)


def gradient_digests(model: Sequence[torch.nn.Module]) -> dict[str, str]:
    """Returns a digest of every parameter's ``main_grad``, by its name and (data, tensor) ranks."""
    ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()
    named = ((name, getattr(parameter, "main_grad", None)) for name, parameter in named_parameters(model))
    return {f"{name} {ranks}": digest(gradient) for name, gradient in named if gradient is not None}


def digest(tensor: Tensor) -> str:
    """Returns a digest of its bits."""
    flat = tensor.detach().to("cpu", torch.float32).contiguous()
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:16]


def _is_a_part(parameter: Any) -> bool:
    return bool(getattr(parameter, "tensor_model_parallel", False))
