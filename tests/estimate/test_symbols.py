"""Parts of layers: a block is the sum of its parts, and hybrid models have the sizes that were published."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.schedules.estimate.activations import activations, whole
from megatron.schedules.estimate.build import Build
from megatron.schedules.estimate.devices import DEVICES
from megatron.schedules.estimate.models import MODELS, Model, built
from megatron.schedules.estimate.parameters import parameters
from megatron.schedules.estimate.roofline import Roofline
from megatron.schedules.estimate.symbols import SYMBOLS, layer_flops
from megatron.schedules.estimate.times import ANY, attention_shares, loads, message_shares

H100 = Roofline(DEVICES["H100-80GB"])
SMALL = """--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 256 --max-position-embeddings 256
    --vocab-size 1000 --bf16 --swiglu"""
MOE = f"{SMALL} --num-experts 8 --moe-ffn-hidden-size 384 --moe-shared-expert-intermediate-size 128"
MLA = "--multi-latent-attention --q-lora-rank 64 --qk-layernorm"
SEQUENCE = "--tensor-model-parallel-size 2 --sequence-parallel"
# A GPT, and the pattern of the same model as a hybrid.
PAIRS = {
    "Llama-3-8B": (MODELS["Llama-3-8B"].flags, "*-" * 32),
    "sequence parallel": (f"{SMALL} {SEQUENCE}", "*-" * 4),
    "some experts": (f"{MOE} --moe-layer-freq [0,1,1,0] --expert-model-parallel-size 4", "*-*E*E*-"),
    "latent attention": (f"{MOE} {MLA}", "+E" * 4),
    "FP8": (f"{SMALL} --fp8-format hybrid --fp8-recipe blockwise", "*-" * 4),
    "multi-token prediction": (f"{SMALL} --mtp-num-layers 2", "*-" * 4 + "/*-/*-"),
}


def both(flags: str, pattern: str) -> tuple[Build, Build]:
    models = Model("GPT", flags), Model("hybrid", f"{flags} --hybrid-layer-pattern '{pattern}'")
    gpt, hybrid = (built(model.args) for model in models)
    return gpt, hybrid


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_a_block_of_a_gpt_is_its_two_layers_in_a_hybrid_model(pair: tuple[str, str]) -> None:
    gpt, hybrid = both(*pair)
    assert len(hybrid.shape.layers) == 2 * len(gpt.shape.layers)
    kept, halves = activations(gpt), activations(hybrid)
    pairs = zip(halves.layers[::2], halves.layers[1::2], strict=True)
    assert [whole(layer) for layer in kept.layers] == [whole(one).plus(whole(other)) for one, other in pairs]
    assert replace(kept, layers=()) == replace(halves, layers=())
    sizes, parts = parameters(gpt), parameters(hybrid)
    assert list(sizes.layers) == [one.plus(two) for one, two in zip(parts.layers[::2], parts.layers[1::2], strict=True)]
    assert replace(sizes, layers=()) == replace(parts, layers=())
    for prices, tokens in ((ANY, 1.0), (H100, gpt.tokens)):
        blocks, layers = loads(gpt, prices, tokens), loads(hybrid, prices, tokens)
        summed = [one.plus(two) for one, two in zip(layers.layers[::2], layers.layers[1::2], strict=True)]
        for block, sum_of_parts in zip(blocks.layers, summed, strict=True):
            assert block.split == pytest.approx(sum_of_parts.split, rel=1e-12)
        assert (blocks.block, layers.block) == (1, 2)
        for end in ("first", "last", "kept_for_output"):
            assert getattr(blocks, end) == getattr(layers, end)
        assert message_shares(gpt, prices, tokens) == pytest.approx(message_shares(hybrid, prices, tokens))
    assert attention_shares(gpt) == pytest.approx(attention_shares(hybrid))


NEMOTRON = """--hidden-size 4096 --num-attention-heads 32 --group-query-attention --num-query-groups 8 --kv-channels 128
    --ffn-hidden-size 21504 --seq-length 8192 --vocab-size 131072 --disable-bias-linear --normalization RMSNorm
    --position-embedding-type none --untie-embeddings-and-output-weights --bf16 --mamba-num-heads 128
    --hybrid-layer-pattern M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"""
# Without its prediction layers: the config of NVIDIA-Nemotron-3-Super-120B-A12B.
SUPER = f"""--hidden-size 4096 --num-attention-heads 32 --group-query-attention --num-query-groups 2 --kv-channels 128
    --num-experts 512 --moe-router-topk 22 --moe-ffn-hidden-size 2688 --moe-latent-size 1024
    --moe-shared-expert-intermediate-size 5376 --mamba-num-heads 128 --seq-length 4096 --vocab-size 131072
    --disable-bias-linear --normalization RMSNorm --position-embedding-type none --untie-embeddings-and-output-weights
    --bf16 --hybrid-layer-pattern {"MEMEMEM*E" + 2 * "MEMEMEM*E" + 4 * "MEMEMEMEM*E" + "MEMEMEM*E" + "MEMEMEME"}"""
QWEN = f"""--hidden-size 2048 --num-attention-heads 16 --group-query-attention --num-query-groups 2 --kv-channels 256
    --num-experts 512 --moe-router-topk 10 --moe-ffn-hidden-size 512 --moe-shared-expert-intermediate-size 512
    --moe-shared-expert-gate --attention-output-gate --swiglu --seq-length 4096 --vocab-size 151936
    --disable-bias-linear --qk-layernorm --normalization RMSNorm --position-embedding-type rope
    --untie-embeddings-and-output-weights --bf16 --hybrid-layer-pattern {"GEGEGE*E" * 12}"""


@pytest.mark.parametrize(
    ("flags", "billions", "within"),
    [
        # arXiv 2504.03624, tables 1 and 2: 8B, of 52 layers.
        (NEMOTRON, 8.1, 0.005),
        # Qwen3-Next-80B-A3B's card: 80B.
        (QWEN, 80.0, 0.01),
        # Its card: 120B.
        (SUPER, 120.0, 0.01),
    ],
    ids=["Nemotron-H-8B", "Qwen3-Next", "Nemotron-3-Super"],
)
def test_published_hybrid_models_have_their_parameters(flags: str, billions: float, within: float) -> None:
    counts = parameters(Model("hybrid", flags).whole)
    found = sum(layer.all for layer in counts.layers) + 2 * counts.table.all + counts.last.all
    assert found / 1e9 == pytest.approx(billions, rel=within)


def megatrons_flops(build: Build, symbol: str) -> float:
    """FLOPs of a layer as ``num_floating_point_operations`` of megatron-core 0.19 counts them, forward."""
    hidden, mamba, delta = build.shape.hidden, build.shape.mamba, build.shape.delta
    if symbol == "M":
        assert mamba is not None
        inner = mamba.heads * mamba.head
        into = 2 * inner + 2 * mamba.groups * mamba.state + mamba.heads
        return 2.0 * hidden * into + 7.0 * inner * mamba.state + 2.0 * inner * hidden
    assert delta is not None
    keys, values = delta.keys * delta.key, delta.values * delta.value
    mixed = delta.reach * (2 * keys + values) + delta.values * delta.value**2 * 4
    return 2.0 * (hidden * (2 * keys + 2 * values + 2 * delta.values) + mixed + hidden * values)


@pytest.mark.parametrize("symbol", ["M", "G"])
def test_scans_compute_what_megatron_logs(symbol: str) -> None:
    build = Model("hybrid", f"{NEMOTRON} --hybrid-layer-pattern MG").whole
    assert layer_flops(build, symbol) == megatrons_flops(build, symbol)


def test_only_attention_grows_with_the_length_of_a_sequence() -> None:
    flags = f"{SMALL} --num-experts 8 --dsa-indexer-n-heads 8 --dsa-indexer-head-dim 64 --dsa-indexer-topk 64"
    short, long = (
        built(Model("hybrid", f"{flags} --hybrid-layer-pattern GM-E+D --seq-length {length}").args)
        for length in (1024, 4096)
    )
    for symbol in SYMBOLS:
        grows = layer_flops(long, symbol) > layer_flops(short, symbol) if symbol != "*" else True
        assert grows == (symbol in "*+D"), symbol
    once, twice = (built(Model("hybrid", f"{flags} --hybrid-layer-pattern {p}").args) for p in ("G+", "GGG+"))
    assert attention_shares(once)[0] > attention_shares(twice)[0] > 0


def test_a_layers_estimate_does_not_depend_on_its_neighbours() -> None:
    model = Model("hybrid", f"{NEMOTRON} --hybrid-layer-pattern M*-")
    alone = [Model("hybrid", f"{NEMOTRON} --hybrid-layer-pattern {symbol}").whole for symbol in "M*-"]
    assert parameters(model.whole).layers == tuple(parameters(each).layers[0] for each in alone)
    assert loads(model.whole).layers == tuple(loads(each).layers[0] for each in alone)
