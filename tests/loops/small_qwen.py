"""A Qwen2 of eight small layers as Hugging Face stores it: frameworks that convert models begin from its weights."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

WORDS = 128


def write(folder: Path) -> None:
    """Writes configuration and weights."""
    torch.manual_seed(7)
    config = Qwen2Config(
        num_hidden_layers=8,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=WORDS,
        max_position_embeddings=64,
        initializer_range=0.1,
        tie_word_embeddings=False,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
