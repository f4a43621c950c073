"""Models whose training was measured, as Megatron's flags."""

from __future__ import annotations

_COMMON = (
    "--swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope --attention-dropout 0 "
    "--hidden-dropout 0 --untie-embeddings-and-output-weights --bf16 --use-distributed-optimizer "
    "--cross-entropy-loss-fusion "
)
_GROUPS = "--group-query-attention --num-query-groups"
_LATENT = (
    "--multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 "
    "--v-head-dim 128 --qk-layernorm"
)

# Sizes of each model from its configuration on Hugging Face.
FLAGS = {
    "Llama-2-7B": "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size 11008 "
    "--vocab-size 32000",
    "Llama-3-70B": "--num-layers 80 --hidden-size 8192 --num-attention-heads 64 --ffn-hidden-size 28672 "
    f"{_GROUPS} 8 --vocab-size 128256",
    "Llama-3.1-405B": "--num-layers 126 --hidden-size 16384 --num-attention-heads 128 --ffn-hidden-size 53248 "
    f"{_GROUPS} 8 --vocab-size 128256",
    "DeepSeek-V3": "--num-layers 61 --hidden-size 7168 --num-attention-heads 128 --ffn-hidden-size 18432 "
    f"{_LATENT} --vocab-size 129280 --num-experts 256 --moe-router-topk 8 --moe-ffn-hidden-size 2048 "
    "--moe-shared-expert-intermediate-size 2048 --moe-layer-freq ([0]*3+[1]*58)",
    "Kimi-K2": "--num-layers 61 --hidden-size 7168 --num-attention-heads 64 --ffn-hidden-size 18432 "
    f"{_LATENT} --vocab-size 163840 --num-experts 384 --moe-router-topk 8 --moe-ffn-hidden-size 2048 "
    "--moe-shared-expert-intermediate-size 2048 --moe-layer-freq ([0]*1+[1]*60)",
    "Qwen3-30B-A3B": "--num-layers 48 --hidden-size 2048 --num-attention-heads 32 --kv-channels 128 --qk-layernorm "
    f"{_GROUPS} 4 --vocab-size 151936 --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768",
    "Qwen3-235B-A22B": "--num-layers 94 --hidden-size 4096 --num-attention-heads 64 --kv-channels 128 --qk-layernorm "
    f"{_GROUPS} 4 --vocab-size 151936 --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 1536",
    "GPT-OSS-120B": "--num-layers 36 --hidden-size 2880 --num-attention-heads 64 --kv-channels 64 "
    f"{_GROUPS} 8 --vocab-size 201088 --num-experts 128 --moe-router-topk 4 --moe-ffn-hidden-size 2880",
}
# How the published tables call them. Names are compared without what is no letter and no digit.
_NAMES = {
    "llama27b": "Llama-2-7B",
    "llama370b": "Llama-3-70B",
    "llama31405b": "Llama-3.1-405B",
    "deepseekv3": "DeepSeek-V3",
    "kimik2": "Kimi-K2",
    "qwen330ba3b": "Qwen3-30B-A3B",
    "qwen3235ba22b": "Qwen3-235B-A22B",
    "gptoss120b": "GPT-OSS-120B",
}


def named(model: str) -> str | None:
    """Returns our name of a model that a table calls ``model``, perhaps with a remark; None if it is not known."""
    plain = "".join(letter for letter in model.partition("(")[0].lower() if letter.isalnum())
    return _NAMES.get(plain)


def flags(name: str) -> str:
    """Returns Megatron's flags of the model called ``name`` here."""
    return f"{_COMMON} {FLAGS[name]}"
