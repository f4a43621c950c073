"""Data types of Transformer Engine's compiled half, and the error for parts that its CPU form lacks."""

from __future__ import annotations

import enum
from typing import Any

import torch


class MissingError(NotImplementedError):
    """The CPU form lacks this part of the compiled half."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what}: Transformer Engine without a GPU lacks this function of its compiled half; use a GPU, or "
            "--transformer-impl local"
        )


DType = enum.IntEnum(
    "DType",
    {
        "kByte": 0,
        "kInt32": 2,
        "kFloat32": 4,
        "kFloat16": 5,
        "kBFloat16": 6,
        "kFloat8E4M3": 7,
        "kFloat8E5M2": 8,
        "kFloat4E2M1": 10,
    },
)
"""Data types as ``transformer_engine.h`` numbers them, those that Python sees."""

_TORCH = {
    DType.kByte: torch.uint8,
    DType.kInt32: torch.int32,
    DType.kFloat32: torch.float32,
    DType.kFloat16: torch.float16,
    DType.kBFloat16: torch.bfloat16,
    DType.kFloat8E4M3: torch.float8_e4m3fn,
    DType.kFloat8E5M2: torch.float8_e5m2,
}


def torch_dtype(dtype: Any) -> torch.dtype:
    """Returns torch's data type for one of Transformer Engine's, which is an enum of its own Python from 2.14 on."""
    return dtype if isinstance(dtype, torch.dtype) else _TORCH[DType(int(dtype))]
