"""A user's own data loader (``--dataloader-type external``) whose state stock saves with each checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.training import get_args

import pretrain_gpt
from megatron.schedules.integration import gpt


class Loader:
    """Endless samples, each of its number. One sample is a microbatch."""

    def __init__(self) -> None:
        self._read = 0

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        args = get_args()
        length = args.seq_length
        words = torch.randint(90, (1, length + 1), generator=torch.Generator().manual_seed(self._read))
        self._read += 1
        return {
            "tokens": words[:, :-1],
            "labels": words[:, 1:],
            "loss_mask": torch.ones(1, length),
            "attention_mask": torch.ones(1, 1, length, length).triu(1).bool(),
            "position_ids": torch.arange(length)[None],
        }

    def save_state(self) -> dict[str, int]:
        """How many samples were read."""
        return {"read": self._read}


def put_in_place(flags: Sequence[str]) -> None:
    """Has jobs read from such loaders, under our schedules in a list, and save their state where checkpoints are."""
    in_list = "--pipeline-schedule" in flags
    parse = pretrain_gpt.parse_and_validate_args

    def parse_and_validate_args(*args: Any, **kwargs: Any) -> Any:
        parsed = parse(*args, **kwargs)
        parsed.dataloader_save = parsed.save
        return parsed

    def provider(num_samples: Sequence[int], vp_stage: int | None = None) -> Any:
        if not gpt._reads(vp_stage):
            return None, None, None
        return tuple([Loader()] if in_list else Loader() for _ in range(3))

    provider.is_distributed = True  # type: ignore[attr-defined]
    pretrain_gpt.parse_and_validate_args, gpt.datasets_provider = parse_and_validate_args, provider
