"""Whole jobs over Transformer Engine's own Python: losses, gradients and weights are stock's to the bit."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests.integration.conftest import Training
from tests.integration.features import MODERN, MOE_ALLTOALL
from tests.integration.results import Result
from tests.integration.server import ROUNDING_VARIABLE
from tests.support.te_python import CAPABILITY_VARIABLE
from tests.tiers import some_by_night

UNFUSED = "--no-gradient-accumulation-fusion"
TENSOR = "--tensor-model-parallel-size 2"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
MOE = f"{MODERN} {MOE_ALLTOALL} --moe-grouped-gemm"
HYBRID = "--hybrid-layer-pattern *-*-*-*-"
MLA = f"{MODERN} --multi-latent-attention --qk-layernorm"
SPARSE = """--experimental-attention-variant dsa --dsa-indexer-n-heads 4 --dsa-indexer-head-dim 64 --dsa-indexer-topk 8
    --no-dsa-indexer-rotate-activation --q-lora-rank 24"""


WIDE = "--seq-length 64 --max-position-embeddings 64 --hidden-size 64 --ffn-hidden-size 128"
LONG = "--seq-length 256 --max-position-embeddings 256 --hidden-size 64 --ffn-hidden-size 128"
FP8 = "--fp8-format hybrid --fp8-recipe"
FP4 = "--fp4-format e2m1"
SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
PRIMARY = f"--fp8-param-gather {SHARDED}"
MX_PRIMARY = f"{PRIMARY} --reuse-grad-buf-for-mxfp8-param-ag"
OVERLAP = f"{TENSOR} --sequence-parallel --tp-comm-overlap --tp-comm-bootstrap-backend gloo"


class Job(NamedTuple):
    """What is trained.

    Args:
        model: flags of stock's that say what the model is.
        flags: other flags of stock's.
        ranks: processes for each of two pipeline ranks.
        tied: whether embedding and output layer share their weights.
        capability: compute capability of the GPU that is not there.
        samples: as :func:`.jobs.train` knows them.
    """

    model: str = ""
    flags: str = ""
    ranks: int = 1
    tied: bool = False
    capability: str = "9.0"
    samples: str = "plain"

    @property
    def replicas(self) -> int:
        """Data-parallel ranks."""
        return 1 if TENSOR in self.flags or "--context-parallel" in self.flags else self.ranks


JOBS = {
    "GPT": Job(flags=UNFUSED),
    "fused accumulation": Job(MODERN),
    "tensor parallel": Job(flags=f"{TENSOR} {UNFUSED}", ranks=2),
    "sequence parallel": Job(MODERN, f"{TENSOR} --sequence-parallel", 2),
    "sequence parallel, not fused": Job(flags=f"{TENSOR} --sequence-parallel {UNFUSED}", ranks=2),
    "overlapped gradient reduction": Job(flags="--overlap-grad-reduce", ranks=2),
    "distributed optimizer": Job(
        flags="--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather", ranks=2
    ),
    "selective recompute": Job(flags="--recompute-granularity selective"),
    "recompute of modules": Job(MODERN, "--recompute-granularity selective --recompute-modules layernorm mlp"),
    "full recompute": Job(MODERN, FULL),
    "grouped experts": Job(MOE),
    "expert parallel": Job(MOE, "--expert-model-parallel-size 2", 2),
    "shared experts overlapped": Job(
        f"{MOE} --moe-shared-expert-intermediate-size 64 --moe-shared-expert-overlap",
        "--expert-model-parallel-size 2",
        2,
    ),
    "tied embeddings": Job(tied=True),
    "qk-layernorm": Job(f"{MODERN} --qk-layernorm"),
    "grouped-query attention": Job(f"{MODERN} --group-query-attention --num-query-groups 2"),
    "multi-latent attention": Job(MLA),
    "multi-token prediction": Job(f"{MODERN} --mtp-num-layers 1"),
    "hybrid, sequence parallel": Job(f"{MODERN} {HYBRID}", f"{TENSOR} --sequence-parallel", 2),
    "hybrid, distributed optimizer": Job(
        f"{MODERN} {HYBRID}", "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather", ranks=2
    ),
    "hybrid, tied embeddings": Job(f"{MODERN} {HYBRID}", tied=True),
    "hybrid, multi-token prediction": Job(f"{MODERN} {HYBRID}*-*-*-*-/*-"),
    "hybrid, full recompute": Job(f"{MODERN} {HYBRID}", FULL),
    "hybrid, expert parallel": Job(f"{MOE} --hybrid-layer-pattern *E*-*E*E", "--expert-model-parallel-size 2", 2),
    "hybrid, packed documents": Job(f"{MODERN} {HYBRID}", "--dataloader-inter-document-masking", samples="packed"),
    "hybrid, latent attention": Job(f"{MLA} --hybrid-layer-pattern +-+-+-+-"),
    "hybrid, sparse attention": Job(f"{MLA} {SPARSE} --hybrid-layer-pattern D-D-D-D-"),
    "late embedding gradients": Job(MODERN, "--defer-embedding-wgrad-compute --wgrad-deferral-limit 0"),
    "dropout": Job(flags="--hidden-dropout 0.1 --attention-dropout 0.1"),
    "context parallel": Job(f"{MODERN} --group-query-attention --num-query-groups 2", "--context-parallel-size 2", 2),
    "packed documents": Job(MODERN, "--dataloader-inter-document-masking", samples="packed"),
    "Transformer Engine's activation": Job(f"{MODERN} --use-te-activation-func --no-bias-swiglu-fusion"),
}
JOBS |= {
    "FP8 tensorwise": Job(f"{MODERN} {WIDE}", f"{FP8} tensorwise"),
    "FP8 tensorwise, sequence parallel": Job(f"{MODERN} {WIDE}", f"{FP8} tensorwise {TENSOR} --sequence-parallel", 2),
    "FP8 tensorwise, ends in bf16": Job(f"{MODERN} {WIDE}", f"{FP8} tensorwise --first-last-layers-bf16"),
    "FP8 tensorwise, grouped experts": Job(f"{MOE} {WIDE}", f"{FP8} tensorwise --moe-router-padding-for-quantization"),
    "FP8 tensorwise, full recompute": Job(f"{MODERN} {WIDE}", f"{FP8} tensorwise {FULL}"),
    "FP8 delayed": Job(f"{MODERN} {WIDE}", f"{FP8} delayed --fp8-amax-history-len 4"),
    "FP8 delayed, sequence parallel": Job(f"{MODERN} {WIDE}", f"{FP8} delayed {TENSOR} --sequence-parallel", 2),
    "FP8 delayed, full recompute": Job(f"{MODERN} {WIDE}", f"{FP8} delayed {FULL}"),
    "FP8 delayed, data parallel": Job(f"{MODERN} {WIDE}", f"{FP8} delayed --overlap-grad-reduce", 2),
    "FP8 blockwise": Job(f"{MODERN} {WIDE}", f"{FP8} blockwise"),
    "FP8 blockwise, sequence parallel": Job(f"{MODERN} {WIDE}", f"{FP8} blockwise {TENSOR} --sequence-parallel", 2),
    "MXFP8": Job(f"{MODERN} {WIDE}", f"{FP8} mxfp8", capability="10.0"),
    "MXFP8, sequence parallel": Job(
        f"{MODERN} {WIDE}", f"{FP8} mxfp8 {TENSOR} --sequence-parallel", 2, capability="10.0"
    ),
    "MXFP8, grouped experts": Job(
        f"{MOE} {WIDE}", f"{FP8} mxfp8 --moe-router-padding-for-quantization", capability="10.0"
    ),
    "FP8 tensorwise, primary weights": Job(f"{MODERN} {WIDE}", f"{FP8} tensorwise {PRIMARY}", 2),
    "FP8 tensorwise, primary weights on Blackwell": Job(
        f"{MODERN} {WIDE}", f"{FP8} tensorwise {PRIMARY}", capability="10.0"
    ),
    "FP8 tensorwise, primary weights, ends in bf16": Job(
        f"{MODERN} {WIDE}", f"{FP8} tensorwise {PRIMARY} --first-last-layers-bf16"
    ),
    "FP8 delayed, primary weights": Job(f"{MODERN} {WIDE}", f"{FP8} delayed {PRIMARY}"),
    "FP8 blockwise, primary weights, sequence parallel": Job(
        f"{MODERN} {WIDE}", f"{FP8} blockwise {PRIMARY} {TENSOR} --sequence-parallel", 2
    ),
    "FP8 blockwise, primary weights, grouped experts": Job(
        f"{MOE} {WIDE}", f"{FP8} blockwise {PRIMARY} --moe-router-padding-for-quantization"
    ),
    "MXFP8, primary weights": Job(f"{MODERN} {WIDE}", f"{FP8} mxfp8 {MX_PRIMARY}", 2, capability="10.0"),
    "MXFP8, primary weights, grouped experts": Job(
        f"{MOE} {WIDE}", f"{FP8} mxfp8 {MX_PRIMARY} --moe-router-padding-for-quantization", capability="10.0"
    ),
    "NVFP4": Job(f"{MODERN} {WIDE}", FP4, capability="10.0"),
    "NVFP4, primary weights": Job(f"{MODERN} {WIDE}", f"{FP4} --fp4-param-gather {SHARDED}", 2, capability="10.0"),
    "NVFP4, sequence parallel": Job(f"{MODERN} {WIDE}", f"{FP4} {TENSOR} --sequence-parallel", 2, capability="10.0"),
    "NVFP4, grouped experts": Job(f"{MOE} {WIDE}", f"{FP4} --moe-router-padding-for-quantization", capability="10.0"),
}
JOBS |= {
    "tensor-parallel overlap": Job(MODERN, OVERLAP, 2),
    "tensor-parallel overlap, not fused": Job(flags=f"{OVERLAP} {UNFUSED}", ranks=2),
    "tensor-parallel overlap, gradients in their own product": Job(MODERN, f"{OVERLAP} --tp-comm-overlap-rs-dgrad", 2),
    "tensor-parallel overlap, full recompute": Job(MODERN, f"{OVERLAP} {FULL}", 2),
    "tensor-parallel overlap, experts": Job(
        MOE, f"{OVERLAP} --expert-model-parallel-size 2 --expert-tensor-parallel-size 1", 2
    ),
    "FP8 tensorwise, tensor-parallel overlap": Job(
        f"{MODERN} {WIDE}", f"{FP8} tensorwise {OVERLAP}", 2, capability="10.0"
    ),
    "FP8 tensorwise, primary weights, tensor-parallel overlap": Job(
        f"{MODERN} {WIDE}", f"{FP8} tensorwise {PRIMARY} {OVERLAP}", 2, capability="10.0"
    ),
    "FP8 tensorwise, ends in bf16, tensor-parallel overlap": Job(
        f"{MODERN} {WIDE}", f"{FP8} tensorwise --first-last-layers-bf16 {OVERLAP}", 2
    ),
    "MXFP8, tensor-parallel overlap": Job(f"{MODERN} {LONG}", f"{FP8} mxfp8 {OVERLAP}", 2, capability="10.0"),
    "FP8 delayed, tensor-parallel overlap": Job(f"{MODERN} {WIDE}", f"{FP8} delayed {OVERLAP}", 2),
}
_ADAPTIVE = "adaptive --pipeline-memory-limit"
ORDERS = {
    "zb-1p": "zb-1p",
    "v-half": "v-half",
    "recompute": f"{_ADAPTIVE} 0.45 --pipeline-save-memory recompute",
    "offload": f"{_ADAPTIVE} 0.45 --pipeline-save-memory offload=0.1 --pipeline-costs 4,4,3",
    "vocabulary": "v-half --pipeline-vocabulary-parallel",
    "hidden messages": "v-zb --overlap-moe-expert-parallel-comm --delay-wgrad-compute",
}
USUAL = {
    ("fused accumulation", "recompute"),
    ("FP8 delayed", "vocabulary"),
}
# Forwards with delayed scaling are not recomputed, and Megatron's full recompute goes without R.
_LEFT_OUT = {(job, "recompute") for job in JOBS if "delayed" in job or job.endswith("full recompute")}
_LEFT_OUT |= {(job, "vocabulary") for job in JOBS if job.endswith(("packed documents", "multi-token prediction"))}
_LEFT_OUT |= {(name, "hidden messages") for name, job in JOBS.items() if "--expert-model-parallel" not in job.flags}
_LEFT_OUT |= {("shared experts overlapped", "hidden messages")}  # both run behind the same messages
_LEFT_OUT |= {("dropout", order) for order in ORDERS if order != "zb-1p"}  # random numbers come in another order


def assert_stocks(ours: Result, stock: Result, shards: bool) -> None:
    """Losses and gradients are the same to the bit; with ``shards`` of gradients, the weights at the end are."""
    assert len(ours.losses) == 3 and ours.losses == stock.losses
    assert ours.evaluations == stock.evaluations
    what = "weights" if shards else "gradients"
    theirs, found = getattr(stock, what), getattr(ours, what)
    assert theirs.keys() == found.keys() and theirs
    assert [str(key) for key, value in theirs.items() if not torch.equal(value, found[key])] == []


@pytest.mark.job
@pytest.mark.parametrize(
    ("job", "order"),
    some_by_night((case for case in product(JOBS, ORDERS) if case not in _LEFT_OUT), lambda *case: case not in USUAL),
)
def test_the_result_is_stocks(te_train: Training, monkeypatch: pytest.MonkeyPatch, job: str, order: str) -> None:
    """NVFP4 rounds to the nearest number: random numbers come in another order in most schedules."""
    wanted = JOBS[job]
    monkeypatch.setenv(CAPABILITY_VARIABLE, wanted.capability)
    monkeypatch.setenv(ROUNDING_VARIABLE, "1")
    flags = ("--train-iters", "3", "--global-batch-size", str(4 * wanted.replicas), "--clip-grad", "0")
    flags += ("--pipeline-model-parallel-size", "2", *wanted.flags.split())
    settings = {"model": tuple(wanted.model.split()), "tied": wanted.tied, "samples": wanted.samples}
    if order == "vocabulary":  # sums of words are in another order than stock's: the same with whole backwards
        whole = ("--pipeline-schedule", "1f1b", "--pipeline-vocabulary-parallel")
        stock = te_train(2 * wanted.ranks, *flags, *whole, **settings)
    else:
        stock = te_train.stock(2 * wanted.ranks, *flags, **settings)
    ours = te_train(2 * wanted.ranks, *flags, "--pipeline-schedule", *ORDERS[order].split(), **settings)
    # Of a gradient that data-parallel ranks share, each has only its part.
    assert_stocks(ours, stock, "--use-distributed-optimizer" in wanted.flags and wanted.replicas > 1)


@pytest.mark.nightly
@pytest.mark.parametrize(("recipe", "capability"), [("tensorwise", "9.0"), ("mxfp8", "10.0")])
def test_checkpoints_of_primary_weights_go_from_any_schedule_to_any_other(
    te_train: Training, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, recipe: str, capability: str
) -> None:
    monkeypatch.setenv(CAPABILITY_VARIABLE, capability)
    # The norm of all gradients, by which they would be clipped, is a sum in the order of the stages.
    flags = ("--train-iters", "4", "--global-batch-size", "8", "--pipeline-model-parallel-size", "2")
    flags += ("--clip-grad", "0")
    flags += tuple(f"{FP8} {recipe} --dist-ckpt-optim-fully-reshardable".split())
    flags += tuple((MX_PRIMARY if recipe == "mxfp8" else PRIMARY).split())
    model = tuple(f"{MODERN} {WIDE}".split())
    straight = None
    for saved, resumed in (("", "v-half"), ("v-half", "zb-1p"), ("zb-1p", "")):
        folder = tmp_path / (saved or "stock")
        first, second = (("--pipeline-schedule", name) if name else () for name in (saved, resumed))
        whole = te_train(4, *flags, *first, "--save", str(folder), "--save-interval", "2", model=model)
        straight = straight or whole
        assert whole.losses == straight.losses
        again = te_train.resume(4, *flags, *second, *model, load=folder, iteration=2)
        assert again.losses == straight.losses[2:] and again.evaluations == straight.evaluations


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("recipe", "capability"), [("tensorwise", "9.0"), ("blockwise", "9.0"), ("mxfp8", "10.0"), ("nvfp4", "10.0")]
)
def test_stocks_job_with_primary_weights_is_that_with_copies_of_bf16_weights(
    te_train: Training, monkeypatch: pytest.MonkeyPatch, recipe: str, capability: str
) -> None:
    """So the CPU form is right about them. They start from the same main weights, which no checkpoint has rounded."""
    monkeypatch.setenv(CAPABILITY_VARIABLE, capability)
    flags = ("--train-iters", "3", "--global-batch-size", "8", "--pipeline-model-parallel-size", "2")
    monkeypatch.setenv(ROUNDING_VARIABLE, "1")
    flags += tuple(f"{FP4 if recipe == 'nvfp4' else f'{FP8} {recipe}'} {SHARDED} {MODERN} {WIDE}".split())
    primary = {"mxfp8": MX_PRIMARY, "nvfp4": "--fp4-param-gather"}.get(recipe, PRIMARY).split()
    copies, alone = (te_train.fresh(4, *flags, *more) for more in ((), primary))
    assert alone.losses == copies.losses and alone.evaluations == copies.evaluations


def test_gradients_rounded_at_random_are_stocks_where_backwards_come_in_its_order(
    te_train: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = JOBS["NVFP4"]
    monkeypatch.setenv(CAPABILITY_VARIABLE, wanted.capability)
    flags = ("--train-iters", "3", "--global-batch-size", "4", "--pipeline-model-parallel-size", "2", *FP4.split())
    model = tuple(wanted.model.split())
    stock, ours = (te_train(2, *flags, *more, model=model) for more in ((), ("--pipeline-schedule", "zb-1p")))
    assert_stocks(ours, stock, shards=False)
    monkeypatch.setenv(ROUNDING_VARIABLE, "1")
    assert te_train(2, *flags, model=model).losses != stock.losses
