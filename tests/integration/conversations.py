"""Made-up conversations and their tokens, where Megatron would read a file through packages that tests do without."""

from __future__ import annotations

from typing import Any

import torch
from megatron.training.datasets import sft_dataset

from megatron.schedules.integration import gpt


def put_in_place() -> None:
    """Let ``--sft`` read them, in this process, whatever ``--data-path`` names."""
    sft_dataset.SFTLowLevelDataset = Conversations
    gpt.build_tokenizer = lambda args: Tokenizer()


class Conversations:
    """Samples of one to three conversations each."""

    def __init__(self, path: str) -> None:
        pass

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> list[dict[str, str]]:
        count = 1 + index % 3
        return [{"role": role, "content": str(index * k)} for k in range(count) for role in ("system", "assistant")]


class Tokenizer:
    """Three to nine tokens a conversation, the first of which is not learned."""

    vocab_size, eod, pad = 95, 94, 93
    unique_identifiers: dict[str, Any] = {}  # noqa: RUF012 - the dataset's cache wants one

    def tokenize_conversation(self, conversation: Any, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        number = sum(int(message["content"]) for message in conversation)
        tokens = (torch.arange(3 + number % 7) * 7 + number) % 90
        return tokens, torch.cat([torch.tensor([sft_dataset.IGNORE_INDEX]), tokens[1:]])
