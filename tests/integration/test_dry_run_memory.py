"""What a dry run says of a rank's memory, against what real jobs hold, tensor by tensor."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from tests.integration.results import MODEL, UNTIED
from tests.support.te_python import CAPABILITY_VARIABLE
from tests.tiers import by_night

MOST_ERROR, LIMITED_ERROR = 0.10, 0.05
SIZE = shlex.split("""
    --num-layers 8 --hidden-size 64 --seq-length 64 --max-position-embeddings 64 --train-iters 1 --eval-iters 0
    --global-batch-size 4
""")
ROTARY = "--position-embedding-type rope --no-rope-fusion"
GATED = "--swiglu --disable-bias-linear"
MODERN = f"{ROTARY} {GATED} --normalization RMSNorm"
EXPERTS = f"{GATED} --num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall"
SHARED_EXPERTS = "--moe-layer-freq 2 --moe-ffn-hidden-size 96 --moe-shared-expert-intermediate-size 64"
DISTRIBUTED = "--use-distributed-optimizer"
TENSOR = "--tensor-model-parallel-size 2"
SEVERAL = "--global-batch-size 8"
FULL = "--recompute-granularity full --recompute-method"
ADAPTIVE = f"{SEVERAL} --pipeline-memory-limit 0.4"
TIED, BF16 = "--bf16", "--bf16 --untie-embeddings-and-output-weights"
FP16 = "--fp16 --initial-loss-scale 1024 --untie-embeddings-and-output-weights"

# The schedule, the ranks for each of two pipeline ranks, and flags.
BY_DEFAULT = {
    "dense, tied, in a V": ("v-half", 1, TIED),
    "grouped queries, in fp32, untied": ("zb-1p", 1, f"--group-query-attention --num-query-groups 2 {UNTIED[0]}"),
    "rotary, gated, RMS norm": ("v-zb", 1, f"{BF16} {MODERN}"),
    "experts, expert parallel, distributed optimizer": (
        "v-half",
        2,
        f"{BF16} {SEVERAL} {EXPERTS} {DISTRIBUTED} --expert-model-parallel-size 2",
    ),
    "multi-token prediction, unequal layers": (
        "1f1b",
        1,
        f"{BF16} --mtp-num-layers 1 {ROTARY} --decoder-first-pipeline-num-layers 5",
    ),
    "tensor and sequence parallel, vocabulary shared": (
        "v-zb",
        2,
        f"{BF16} {TENSOR} --sequence-parallel --pipeline-vocabulary-parallel",
    ),
    "full recompute": ("1f1b", 1, f"{BF16} {FULL} uniform --recompute-num-layers 2"),
}
IN_FULL = {
    "norms of heads, biases into attention": ("zb-2p", 1, f"{BF16} --qk-layernorm --add-qkv-bias"),
    "some layers with experts": ("v-half", 2, f"{BF16} {SEVERAL} {EXPERTS} {SHARED_EXPERTS} {DISTRIBUTED}"),
    "experts, tensor parallel": ("v-half", 2, f"{BF16} {EXPERTS} {TENSOR} --sequence-parallel"),
    "experts on ranks of their own": (
        "v-half",
        2,
        f"{BF16} {EXPERTS} {TENSOR} --sequence-parallel --expert-tensor-parallel-size 1 --expert-model-parallel-size 2",
    ),
    "full recompute of a layer a stage": ("v-half", 1, f"{BF16} {FULL} block --recompute-num-layers 1"),
    "selective recompute": ("v-half", 1, f"{BF16} --recompute-granularity selective"),
    "gated attention": ("v-half", 1, f"{BF16} {MODERN} --attention-output-gate"),
    "recomputed by the plan": ("adaptive", 1, f"{BF16} {ADAPTIVE} --pipeline-save-memory recompute"),
    "offloaded by the plan": (
        "adaptive",
        1,
        f"{BF16} {ADAPTIVE} --pipeline-save-memory offload=25 --pipeline-costs 1,1.1,0.8",
    ),
    "dropout": ("interleaved-1f1b", 1, f"{BF16} --attention-dropout 0.1 --hidden-dropout 0.1"),
    "fp16, a layout, SGD": (
        "1f1b-v",
        1,
        f"{FP16} --pipeline-model-parallel-layout Ett|tt|ttt|tL --optimizer sgd",
    ),
    "tensor parallel alone, one group a rank": (
        "v-zb",
        2,
        f"{BF16} {TENSOR} --group-query-attention --num-query-groups 2",
    ),
    "a large vocabulary, shared": (
        "zb-1p",
        1,
        f"{TIED} {SEVERAL} --micro-batch-size 2 --vocab-size 4000 --pipeline-vocabulary-parallel",
    ),
    "an activation function in pieces, larger microbatches": (
        "v-zb",
        1,
        f"{BF16} {GATED} --no-bias-swiglu-fusion --micro-batch-size 2 --vocab-size 1000",
    ),
}


def cases() -> list[Any]:
    full = [pytest.param(*case, id=name, marks=pytest.mark.nightly) for name, case in IN_FULL.items()]
    return [pytest.param(*case, id=name) for name, case in BY_DEFAULT.items()] + full


@pytest.mark.job
@pytest.mark.parametrize(("schedule", "replicas", "flags"), cases())
def test_a_rank_holds_what_a_dry_run_says(megatron, schedule: str, replicas: int, flags: str):
    """Weights, gradients and optimizer to the byte, activations within a tenth."""
    pipeline = ["--pipeline-model-parallel-size", "2", "--pipeline-schedule", schedule]
    ranks, said = megatron("held_and_estimated", 2 * replicas, [*MODEL, *SIZE, *pipeline, *shlex.split(flags)])
    for held, estimated in zip(ranks, said, strict=True):
        for part in ("weights", "gradients", "optimizer"):
            assert getattr(estimated, part) == held[part] > 0, part
        assert estimated.activations == pytest.approx(held["activations"], rel=MOST_ERROR)


ONE_KERNEL = {
    "dense": "",
    "rotary, gated, RMS norm": MODERN,
    "latent attention": f"""{MODERN} --multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 8
        --qk-pos-emb-head-dim 8 --v-head-dim 16 --qk-layernorm""",
}
KERNEL_BY_DEFAULT = ("rotary, gated, RMS norm",)


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(flags, id=name, marks=() if name in KERNEL_BY_DEFAULT else pytest.mark.nightly)
        for name, flags in ONE_KERNEL.items()
    ],
)
def test_attention_in_one_kernel_keeps_no_scores(megatron, flags: str):
    pipeline = "--pipeline-model-parallel-size 2 --pipeline-schedule v-half --seq-length 256".split()
    asked = [*MODEL, *SIZE, *pipeline, "--max-position-embeddings", "256", *shlex.split(f"{BF16} {flags}")]
    ranks, said = megatron("held_and_estimated", 2, asked, True)
    for held, estimated in zip(ranks, said, strict=True):
        assert estimated.weights == held["weights"]
        assert estimated.activations == pytest.approx(held["activations"], rel=MOST_ERROR)


@pytest.mark.parametrize(("schedule", "flags"), [("1f1b", BF16), by_night("v-half", f"{BF16} {MODERN}")])
def test_where_only_adapters_are_trained(megatron, schedule: str, flags: str):
    """Frozen linears keep nothing; their weights have neither gradients nor an optimizer."""
    pipeline = ["--pipeline-model-parallel-size", "2", "--pipeline-schedule", schedule]
    asked = [*MODEL, *SIZE, *pipeline, *shlex.split(flags)]
    ranks, said = megatron("held_and_estimated", 2, asked, adapters=True)
    for held, estimated in zip(ranks, said, strict=True):
        for part in ("weights", "gradients", "optimizer"):
            assert getattr(estimated, part) == held[part] > 0, part
        assert estimated.activations == pytest.approx(held["activations"], rel=MOST_ERROR)


@pytest.mark.parametrize("schedule", ["v-min", by_night("zb-1p")])
def test_so_it_is_on_four_ranks(megatron, schedule: str):
    flags = [*SIZE, "--global-batch-size", "8", "--pipeline-model-parallel-size", "4", "--pipeline-schedule", schedule]
    ranks, said = megatron("held_and_estimated", 4, [*MODEL, *UNTIED, *flags])
    for held, estimated in zip(ranks, said, strict=True):
        assert estimated.static == held["weights"] + held["gradients"] + held["optimizer"]
        assert estimated.activations == pytest.approx(held["activations"], rel=MOST_ERROR)


# Jobs on Transformer Engine's own Python, whose attention keeps scores on a CPU: ranks as above, capability and flags.
TE_SIZE = shlex.split(f"""
    --num-layers 4 --hidden-size 128 --ffn-hidden-size 512 --num-attention-heads 8 --seq-length 64
    --max-position-embeddings 64 --train-iters 2 --eval-iters 0 --micro-batch-size 4 --global-batch-size 16 --bf16
    --attention-backend unfused --pipeline-model-parallel-size 2 {UNTIED[0]}
""")
FP8, SEQUENCE = "--fp8-format hybrid --fp8-recipe", f"{TENSOR} --sequence-parallel"
TE_MOE = f"{MODERN} {EXPERTS} --moe-grouped-gemm --moe-ffn-hidden-size 256 --moe-shared-expert-intermediate-size 128"
SHARDED = f"{DISTRIBUTED} --overlap-grad-reduce --overlap-param-gather"
# Padding of experts' rows is not counted: enough of them that it is little.
TE_FP8_MOE = f"{TE_MOE} --moe-router-padding-for-quantization --micro-batch-size 16 --global-batch-size 64"
MLA = f"""{MODERN} --multi-latent-attention --q-lora-rank 64 --kv-lora-rank 32 --qk-head-dim 16 --qk-pos-emb-head-dim 16
    --v-head-dim 32"""
TE_BY_DEFAULT = {
    "tensorwise": ("v-half", 1, "9.0", f"{MODERN} {FP8} tensorwise"),
}
TE_IN_FULL = {
    "delayed, sequence parallel": ("zb-1p", 2, "9.0", f"{MODERN} {FP8} delayed {SEQUENCE}"),
    "mxfp8, experts": ("zb-1p", 1, "10.0", f"{TE_FP8_MOE} {FP8} mxfp8"),
    "bf16": ("v-half", 1, "8.0", MODERN),
    "bf16, sequence parallel": ("zb-1p", 2, "8.0", f"{MODERN} {SEQUENCE}"),
    "bf16, experts": ("zb-1p", 1, "8.0", TE_MOE),
    "bf16, norms of heads": ("v-half", 1, "8.0", f"{MODERN} --qk-layernorm"),
    "bf16, gated attention": ("zb-1p", 1, "8.0", f"{MODERN} --attention-output-gate"),
    "blockwise, biases": ("v-min", 1, "9.0", f"{FP8} blockwise"),
    "delayed, experts": ("zb-1p", 1, "9.0", f"{TE_FP8_MOE} {FP8} delayed"),
    "tensorwise, gradients not fused": (
        "zb-1p",
        2,
        "9.0",
        f"{MODERN} {FP8} tensorwise {SEQUENCE} --no-gradient-accumulation-fusion",
    ),
    "tensorwise, ends in bf16": ("zb-1p", 1, "9.0", f"{MODERN} {FP8} tensorwise --first-last-layers-bf16"),
    "tensorwise, latent attention": ("zb-1p", 1, "9.0", f"{MLA} {FP8} tensorwise"),
    "tensorwise, primary weights, multi-token prediction": (
        "zb-1p",
        2,
        "9.0",
        f"{MODERN} {FP8} tensorwise --fp8-param-gather {SHARDED} --first-last-layers-bf16 --mtp-num-layers 1",
    ),
    "mxfp8, primary weights": (
        "v-half",
        2,
        "10.0",
        f"{MODERN} {FP8} mxfp8 --fp8-param-gather --reuse-grad-buf-for-mxfp8-param-ag {SHARDED}",
    ),
    "nvfp4": ("zb-1p", 1, "10.0", f"{MODERN} --fp4-format e2m1"),
    "tensorwise, multi-token prediction": ("zb-1p", 1, "9.0", f"{MODERN} {FP8} tensorwise --mtp-num-layers 1"),
    "tensorwise, recomputed by the plan": (
        "adaptive",
        1,
        "9.0",
        f"{MODERN} {FP8} tensorwise --pipeline-memory-limit 0.4 --pipeline-save-memory recompute",
    ),
    "blockwise, offloaded by the plan": (
        "adaptive",
        1,
        "9.0",
        f"{MODERN} {FP8} blockwise --pipeline-memory-limit 0.4 --pipeline-save-memory offload=25 "
        "--pipeline-costs 1,1.1,0.8",
    ),
}
# The same for hybrid models.
HYBRID = "--hybrid-layer-pattern"
SPARSE = """--experimental-attention-variant dsa --dsa-indexer-n-heads 4 --dsa-indexer-head-dim 32 --dsa-indexer-topk 16
    --no-dsa-indexer-rotate-activation"""
MIXERS = """--spec tests.integration.kernel_mixers STACK --mamba-head-dim 16 --mamba-state-dim 32 --mamba-num-groups 2
    --mamba-num-heads 16 --linear-key-head-dim 16 --linear-value-head-dim 32 --linear-num-key-heads 4
    --linear-num-value-heads 8"""
HYBRIDS = {
    "Mamba and gated delta nets": ("v-half", 1, "9.0", f"{TE_MOE} {MIXERS} {HYBRID} MEG-"),
}
HYBRIDS_IN_FULL = {
    "experts, within GiB, layers placed by the plan": (
        "adaptive",
        1,
        "9.0",
        f"{TE_MOE} {HYBRID} *E*-*E*E --pipeline-memory-limit 0.0055GiB --pipeline-layers auto",
    ),
    "Mamba": ("zb-1p", 1, "9.0", f"{MODERN} {MIXERS} {HYBRID} MMMMMMMM"),
    "gated delta nets": ("zb-1p", 1, "9.0", f"{MODERN} {MIXERS} {HYBRID} GGGGGGGG"),
    "sparse attention": ("zb-1p", 1, "9.0", f"{MLA} --qk-layernorm {SPARSE} {HYBRID} D-D-D-D-"),
    "all kinds, sequence parallel": ("v-half", 2, "9.0", f"{TE_MOE} {MIXERS} {SEQUENCE} {HYBRID} ME*-GEM-GE*E"),
    "experts, unequal stages": ("v-half", 1, "9.0", f"{TE_MOE} {HYBRID} *E|*-*|EE|*-*E"),
    "recomputed by the plan": (
        "adaptive",
        1,
        "9.0",
        f"{TE_MOE} {HYBRID} *E*-*E*E*-*E --pipeline-memory-limit 0.5 --pipeline-save-memory recompute",
    ),
    "offloaded by the plan": (
        "adaptive",
        1,
        "9.0",
        f"{MODERN} {HYBRID} *-*-*-*-*-*-*-*- --pipeline-memory-limit 0.45 --pipeline-save-memory offload=25 "
        "--pipeline-costs 1,1.1,0.8",
    ),
    "a shared vocabulary": (
        "v-half",
        1,
        "9.0",
        f"{MODERN} {HYBRID} *-*-*-*- --vocab-size 2000 --pipeline-vocabulary-parallel",
    ),
    "dense, in a V": ("v-half", 1, "9.0", f"{MODERN} {HYBRID} *-*-*-*-"),
    "experts of a latent width": ("v-half", 1, "9.0", f"{TE_MOE} --moe-latent-size 64 {HYBRID} *E*E*E*E"),
    "biases": ("zb-1p", 1, "9.0", f"{HYBRID} *-*-*-*-"),
    "gated attention": ("v-half", 1, "9.0", f"{MODERN} --attention-output-gate --qk-layernorm {HYBRID} *-*-*-*-"),
    "latent attention": ("zb-1p", 1, "9.0", f"{MLA} --qk-layernorm {HYBRID} +-+-+-+-"),
    "sequence parallel": ("v-half", 2, "9.0", f"{MODERN} {SEQUENCE} {HYBRID} *-*-*-*-"),
    "multi-token prediction": ("zb-1p", 1, "9.0", f"{MODERN} {HYBRID} *-*-*-*-/*-"),
    "tensorwise": ("zb-1p", 1, "9.0", f"{MODERN} {FP8} tensorwise {HYBRID} *-*-*-*-"),
}
_COPIES_ERROR = 1e-3


def te_cases(by_default: dict[str, Any], in_full: dict[str, Any]) -> list[Any]:
    full = [pytest.param(*case, id=name, marks=pytest.mark.nightly) for name, case in in_full.items()]
    return [pytest.param(*case, id=name) for name, case in by_default.items()] + full


@pytest.mark.job
@pytest.mark.parametrize(("schedule", "replicas", "capability", "flags"), te_cases(HYBRIDS, HYBRIDS_IN_FULL))
def test_a_rank_of_a_hybrid_model_too(te, monkeypatch, schedule: str, replicas: int, capability: str, flags: str):
    test_in_fp8_too(te, monkeypatch, schedule, replicas, capability, flags)


@pytest.mark.job
@pytest.mark.parametrize(("schedule", "replicas", "capability", "flags"), te_cases(TE_BY_DEFAULT, TE_IN_FULL))
def test_in_fp8_too(te, monkeypatch, schedule: str, replicas: int, capability: str, flags: str):
    """Weights with their quantized copies within a thousandth, which is scales; activations within 5 %."""
    monkeypatch.setenv(CAPABILITY_VARIABLE, capability)
    local = ("--transformer-impl", "local", "--no-gradient-accumulation-fusion")
    job = [*(flag for flag in MODEL if flag not in local), *TE_SIZE, "--pipeline-schedule", schedule]
    ranks, said = te("held_and_estimated", 2 * replicas, [*job, *shlex.split(flags)])
    for held, estimated in zip(ranks, said, strict=True):
        assert estimated.weights == pytest.approx(held["weights"], rel=_COPIES_ERROR)
        assert estimated.activations == pytest.approx(held["activations"], rel=LIMITED_ERROR)


# Flags, and the limit against what 1F1B holds with them. Full recompute leaves little beside a layer and messages.
LIMITED = {
    "layers alone": ("", 0.8),
    "selective recompute": ("--recompute-granularity selective", 0.8),
    "full recompute": (f"{FULL} uniform --recompute-num-layers 1", 2.0),
    "recompute passes": ("--pipeline-save-memory recompute", 0.8),
}
LIMITED_BY_DEFAULT = ("layers alone", "selective recompute")


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        pytest.param(*case, id=name, marks=() if name in LIMITED_BY_DEFAULT else pytest.mark.nightly)
        for name, case in LIMITED.items()
    ],
)
def test_a_limit_in_gib_is_kept(megatron, flags: str, part: float):
    """Dry run and the bytes of a job agree within 5 %, and both are below the limit."""
    job = [*MODEL, *SIZE, *shlex.split(f"{BF16} {SEVERAL} {flags}"), "--pipeline-model-parallel-size", "2"]
    usual = [flag for flag in job if flag not in ("--pipeline-save-memory", "recompute")]
    whole, _ = megatron("held_and_estimated", 2, [*usual, "--pipeline-schedule", "1f1b"])
    limit = part * max(rank["activations"] for rank in whole)
    adaptive = f"--pipeline-schedule adaptive --pipeline-memory-limit {limit / 2**30}GiB"
    ranks, said = megatron("held_and_estimated", 2, [*job, *adaptive.split()])
    for held, estimated in zip(ranks, said, strict=True):
        assert estimated.activations + estimated.messages <= limit
        assert held["activations"] <= limit
        assert held["activations"] == pytest.approx(estimated.activations, rel=LIMITED_ERROR)
