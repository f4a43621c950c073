"""Jobs whose layers are CUDA graphs, over Transformer Engine's own Python and a model of CUDA graphs on the CPU.

Losses of all iterations, and the gradients of all parameters in each, are those of the same job without graphs, to the
bit. The first iteration has no graphs; the others replay them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pytest
import torch
from _pytest.mark import ParameterSet

from tests.integration.features import MODERN, MOE_ALLTOALL
from tests.integration.results import MODEL, UNTIED, Call, Graphed
from tests.integration.server import ROUNDING_VARIABLE, VERSIONS, Megatron
from tests.support.te_python import CAPABILITY_VARIABLE
from tests.tiers import by_night

LOCAL = ("--transformer-impl", "local", "--no-gradient-accumulation-fusion")
JOB = [*(flag for flag in MODEL if flag not in LOCAL), *UNTIED, *"--bf16 --clip-grad 0 --te-rng-tracker".split()]
JOB += "--no-check-for-nan-in-loss-and-grad --pipeline-model-parallel-size 2".split()
GRAPHS = "--cuda-graph-impl transformer_engine --cuda-graph-warmup-steps"
ATTENTION, MLP, LAYERS = "--cuda-graph-modules attn", "--cuda-graph-modules mlp", ""
ROUTER = "--cuda-graph-modules moe_router moe_preprocess"
BOTH = "--cuda-graph-modules attn moe_router moe_preprocess"
ATTENTION_AND_MLP = "--cuda-graph-modules attn mlp"
EXPERTS = "--cuda-graph-modules attn moe"
SCORES = "--cuda-graph-modules moe_router"
ATTENTION_AND_SCORES = "--cuda-graph-modules attn moe_router"
WHAT = {
    ATTENTION_AND_SCORES: "attention and the router alone",
    SCORES: "the router alone",
    EXPERTS: "attention and experts of one size",
    ATTENTION: "attention",
    MLP: "MLP",
    ATTENTION_AND_MLP: "attention and MLP",
    LAYERS: "whole layers",
    ROUTER: "the router",
    BOTH: "attention and the router",
}
MOE = f"{MODERN} {MOE_ALLTOALL} --moe-grouped-gemm"
WIDE = f"{MODERN} --seq-length 64 --max-position-embeddings 64 --hidden-size 64 --ffn-hidden-size 128"
FP8, FP4 = "--fp8-format hybrid --fp8-recipe", "--fp4-format e2m1"
OVERLAP = "--overlap-grad-reduce --global-batch-size 8"


class Job(NamedTuple):
    """What is trained.

    Args:
        schedule: value of our flag, and other flags of ours.
        graphs: what stock captures.
        flags: other flags of stock's.
        ranks: processes for each of two pipeline ranks.
        capability: compute capability of the GPU that is not there.
        adapters: whether only low-rank adapters are trained.
    """

    schedule: str = "v-half"
    graphs: str = ATTENTION
    flags: str = MODERN
    ranks: int = 1
    capability: str = "9.0"
    adapters: bool = False


DAY = {"attention": Job()}
NIGHT = {
    "attention and router": Job("zb-1p", BOTH, f"{MOE} --num-layers 4"),
    "whole layers": Job(graphs=LAYERS),
    "attention and MLP": Job("v-zb", ATTENTION_AND_MLP),
    "MLP": Job(graphs=MLP),
    "router": Job("v-zb", ROUTER, MOE),
    "shared experts": Job("v-half", BOTH, f"{MOE} --moe-shared-expert-intermediate-size 64"),
    "shared experts outside": Job(
        "v-half", SCORES, f"{MOE} --moe-shared-expert-intermediate-size 64 --moe-shared-expert-overlap"
    ),
    "zb-1p": Job("zb-1p"),
    "zb-1p, whole layers": Job("zb-1p", LAYERS),
    "v-zb": Job("v-zb"),
    "v-min": Job("v-min"),
    "1f1b": Job("1f1b"),
    "1f1b-v": Job("1f1b-v"),
    "interleaved-1f1b": Job("interleaved-1f1b"),
    "adaptive": Job("adaptive --pipeline-memory-limit 0.6"),
    "biases": Job(flags="--position-embedding-type learned_absolute"),
    "not fused": Job(flags=f"{MODERN} --no-gradient-accumulation-fusion"),
    "multi-latent attention": Job(flags=f"{MODERN} --multi-latent-attention --qk-layernorm"),
    "odd microbatches": Job("v-half", LAYERS, f"{MODERN} --global-batch-size 3"),
    "overlapped gradient reduction": Job("v-half", ATTENTION, f"{MODERN} {OVERLAP}", 2),
    "distributed optimizer": Job(
        "v-half",
        ATTENTION_AND_MLP,
        f"{MODERN} {OVERLAP} --use-distributed-optimizer --overlap-param-gather",
        2,
    ),
    "sequence parallel": Job("v-half", LAYERS, f"{MODERN} --tensor-model-parallel-size 2 --sequence-parallel", 2),
    "expert parallel": Job("v-half", BOTH, f"{MOE} --expert-model-parallel-size 2 --global-batch-size 8", 2),
    "FP8 tensorwise": Job(flags=f"{WIDE} {FP8} tensorwise"),
    "FP8 delayed": Job(flags=f"{WIDE} {FP8} delayed --fp8-amax-history-len 4"),
    "FP8 blockwise": Job("v-half", LAYERS, f"{WIDE} {FP8} blockwise"),
    "MXFP8": Job(flags=f"{WIDE} {FP8} mxfp8", capability="10.0"),
    "NVFP4": Job(flags=f"{WIDE} {FP4}", capability="10.0"),
}
SHARDED = f"{OVERLAP} --use-distributed-optimizer --overlap-param-gather"
FP8_EXPERTS = f"{WIDE} {MOE_ALLTOALL} --moe-grouped-gemm --moe-router-padding-for-quantization"
NIGHT |= {
    "four ranks": Job("v-zb", LAYERS, f"{MODERN} --pipeline-model-parallel-size 4 --global-batch-size 12", 2),
    "FP8 tensorwise, primary weights": Job(
        "v-half", LAYERS, f"{WIDE} {FP8} tensorwise --fp8-param-gather {SHARDED}", 2
    ),
    "FP8 tensorwise, sequence parallel": Job(
        "v-half", LAYERS, f"{WIDE} {FP8} tensorwise --tensor-model-parallel-size 2 --sequence-parallel", 2
    ),
    "FP8 delayed, data parallel": Job("zb-1p", ATTENTION, f"{WIDE} {FP8} delayed {OVERLAP}", 2),
    "FP8 blockwise, experts": Job("v-half", ATTENTION_AND_SCORES, f"{FP8_EXPERTS} {FP8} blockwise"),
    "MXFP8, experts, primary weights": Job(
        "v-half",
        ATTENTION_AND_SCORES,
        f"{FP8_EXPERTS} {FP8} mxfp8 --fp8-param-gather --reuse-grad-buf-for-mxfp8-param-ag {SHARDED}",
        2,
        capability="10.0",
    ),
}
RECOMPUTED = "--recompute-granularity selective --recompute-modules"
NIGHT |= {
    "core attention recomputed in its graph": Job(flags=f"{MODERN} {RECOMPUTED} core_attn"),
    "MLP recomputed in its graph": Job("v-half", LAYERS, f"{MODERN} {RECOMPUTED} mlp"),
    "norms recomputed": Job(flags=f"{MODERN} {RECOMPUTED} layernorm"),
    "projections of latent attention recomputed": Job(
        flags=f"{MODERN} --multi-latent-attention --qk-layernorm {RECOMPUTED} mla_up_proj"
    ),
    "activations of experts recomputed outside": Job("v-half", BOTH, f"{MOE} {RECOMPUTED} moe_act"),
    "as DeepSeek-V3's recipe": Job(
        "v-zb",
        BOTH,
        f"{MOE} --multi-latent-attention --qk-layernorm --moe-shared-expert-intermediate-size 64 "
        f"{RECOMPUTED} moe_act mla_up_proj",
    ),
    "vocabulary parallel": Job("v-half --pipeline-vocabulary-parallel", LAYERS),
    "hidden messages of experts": Job(
        "v-half",
        BOTH,
        f"{MOE} --expert-model-parallel-size 2 --global-batch-size 8 --overlap-moe-expert-parallel-comm",
        2,
    ),
    "experts of one size": Job(
        "v-half",
        EXPERTS,
        f"{MODERN} --num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --moe-grouped-gemm "
        "--moe-expert-capacity-factor 1 --moe-pad-expert-input-to-capacity",
    ),
    "multi-token prediction": Job("v-half", ATTENTION, f"{MODERN} --mtp-num-layers 1"),
    "low-rank adapters": Job("v-half", LAYERS, adapters=True),
    "low-rank adapters in MLPs": Job("zb-1p", MLP, adapters=True),
}
HYBRID = f"{MODERN} --hybrid-layer-pattern *-*-*-*-"
HYBRID_MOE = f"{MOE} --hybrid-layer-pattern *E*E*E*E"
ONE_SIZE = "--moe-expert-capacity-factor 1 --moe-pad-expert-input-to-capacity"
IN_HYBRID = {
    LAYERS: HYBRID,
    ATTENTION: HYBRID,
    MLP: HYBRID,
    ATTENTION_AND_MLP: HYBRID,
    BOTH: HYBRID_MOE,
    ROUTER: HYBRID_MOE,
    SCORES: HYBRID_MOE,
    ATTENTION_AND_SCORES: HYBRID_MOE,
    EXPERTS: f"{HYBRID_MOE} {ONE_SIZE}",
}
"""For what stock captures, the flags of the hybrid model of the same layers."""
NIGHT |= {
    f"hybrid model, {WHAT[graphs]}, {schedule}": Job(schedule, graphs, flags)
    for graphs, flags in IN_HYBRID.items()
    for schedule in ("zb-1p", "v-half")
}
JOBS = DAY | NIGHT
EACH_IN_FLIGHT = {"odd microbatches", "FP8 tensorwise, primary weights"}
"""Jobs in which all microbatches of the first rank are in flight at once, so that none reuses a slot."""
ITERATIONS = 3
OLDEST = VERSIONS.index("2.16.0")


class Jobs:
    """Runs jobs with and without graphs on one version of Transformer Engine."""

    def __init__(self, server: Megatron, patch: pytest.MonkeyPatch) -> None:
        self._server, self._patch = server, patch
        self._without: dict[Job, list[Graphed]] = {}

    def __call__(self, job: Job, *more: str, warmup: int = 1, fault: str = "") -> list[Graphed]:
        """The job with graphs from iteration ``warmup`` on, from 0."""
        return self._run(job, [*f"{GRAPHS} {warmup} {job.graphs}".split(), *more], fault)

    def without(self, job: Job) -> list[Graphed]:
        """The same job without graphs."""
        plain = job._replace(graphs="")
        if plain not in self._without:
            self._without[plain] = self._run(plain, [], "")
        return self._without[plain]

    def _run(self, job: Job, more: Sequence[str], fault: str) -> list[Graphed]:
        self._patch.setenv(CAPABILITY_VARIABLE, job.capability)
        self._patch.setenv(ROUNDING_VARIABLE, "1")
        flags = (
            f"--train-iters {ITERATIONS} --global-batch-size 4 {job.flags} --pipeline-schedule {job.schedule}".split()
        )
        ranks: list[Graphed] = self._server("graphed", 2 * job.ranks, [*JOB, *flags, *more], fault, job.adapters)
        return ranks


@pytest.fixture(scope="module")
def jobs(te: Megatron) -> Iterator[Jobs]:
    with pytest.MonkeyPatch.context() as patch:
        yield Jobs(te, patch)


def unequal(ours: Sequence[Graphed], wanted: Sequence[Graphed], iterations: int = ITERATIONS) -> list[str]:
    """Names of what is not the same on some rank and in some iteration."""
    assert wanted[0].gradients[0] and len(wanted[-1].losses) == len(wanted[0].gradients) == iterations
    found = [] if ours[-1].losses == wanted[-1].losses else ["losses"]
    for rank, (graphed, plain) in enumerate(zip(ours, wanted, strict=True)):
        for iteration, (a, b) in enumerate(zip(graphed.gradients, plain.gradients, strict=True)):
            assert a.keys() == b.keys()
            found += [f"rank {rank}, iteration {iteration}: {name}" for name in a if a[name] != b[name]]
    return found


def cases() -> Iterator[ParameterSet]:
    """All jobs, with the row of docs/compatibility.md that each belongs to."""
    for name, job in JOBS.items():
        model = "hybrid" if "--hybrid-layer-pattern" in job.flags else "GPT"
        feature = pytest.mark.feature(f"CUDA graphs of {WHAT[job.graphs]}", job.schedule.split()[0], model=model)
        yield pytest.param(name, marks=[feature] if name in DAY else [feature, pytest.mark.nightly])


@pytest.mark.job
@pytest.mark.parametrize("name", cases())
def test_gradients_are_those_of_the_job_without_graphs(jobs: Jobs, name: str) -> None:
    ours, plain = jobs(JOBS[name]), jobs.without(JOBS[name])
    assert unequal(ours, plain) == []
    for rank in ours:
        assert rank.replays == [0, rank.replays[1], rank.replays[1]] and rank.replays[1] >= rank.captures > 0
    assert ours[0].replays[1] > ours[0].captures or name in EACH_IN_FLIGHT


@pytest.mark.job
@pytest.mark.parametrize("fault", ["one slot", *map(by_night, ("no copy in", "stale"))])
def test_missing_copies_stale_memory_and_a_slot_of_several_are_noticed(jobs: Jobs, fault: str) -> None:
    """By the model of CUDA graphs: as on a GPU, gradients are wrong without a word."""
    assert unequal(jobs(DAY["attention"], fault=fault), jobs.without(DAY["attention"]))


@pytest.mark.nightly
def test_a_slot_that_is_free_one_pass_too_early_is_noticed(jobs: Jobs) -> None:
    assert unequal(jobs(JOBS["1f1b"], fault="slots end early"), jobs.without(JOBS["1f1b"]))


@pytest.mark.nightly
def test_a_missing_copy_of_an_output_is_noticed(jobs: Jobs) -> None:
    """A linear outside of graphs reads what a graph gives, and its W comes when other graphs have that memory."""
    job = JOBS["shared experts outside"]
    assert unequal(jobs(job, fault="outputs in place"), jobs.without(job))


@pytest.mark.nightly
def test_graphs_may_be_captured_before_the_first_iteration(jobs: Jobs) -> None:
    ours = jobs(DAY["attention"], warmup=0)
    assert unequal(ours, jobs.without(DAY["attention"])) == []
    assert ours[0].replays == [ours[0].replays[0]] * 3 and ours[0].replays[0] > ours[0].captures


LOOP = (Call(2, forward_only=True), Call(5, seed=1), Call(5, seed=2), Call(7, forward_only=True), Call(5, seed=4))


@pytest.mark.nightly
@pytest.mark.parametrize(("calls", "capture_before"), [(LOOP[1:], 0), (LOOP, 1), (LOOP, 2)])
def test_a_loop_on_megatron_core_captures_with_stocks_helper(
    te: Megatron, calls: Sequence[Call], capture_before: int
) -> None:
    """As Megatron-Bridge's does. This one evaluates in training mode, where layers replay their graphs."""
    sizes, settings = {"pipeline_model_parallel_size": 2}, {"schedule": "zb-1p"}
    model = {"engine": True, "params_dtype": torch.bfloat16, "bf16": True, "use_te_rng_tracker": True, "layers": 4}
    graphs = {"cuda_graph_impl": "transformer_engine", "capture_before": capture_before}
    ours, plain = (te("graphed_loop", sizes, settings, calls, **model, **more) for more in (graphs, {}))
    for rank, its in zip(ours, plain, strict=True):
        for call, without in zip(rank, its, strict=True):
            assert "B" not in call.passes, "a form of backward less to capture"
            counts = [passes.get("I", 0) + passes.get("B", 0) for passes in (call.passes, without.passes)]
            assert counts[0] == counts[1] == call.passes.get("W", 0)
            assert call.gradients.keys() == without.gradients.keys()
            assert all(torch.equal(call.gradients[name], g) for name, g in without.gradients.items())
            assert [each["loss"] for each in call.results] == [each["loss"] for each in without.results]
    assert all(any(gradient.any() for gradient in rank[-1].gradients.values()) for rank in ours)


@pytest.mark.nightly
@pytest.mark.parametrize("version", VERSIONS[OLDEST:-1])
@pytest.mark.parametrize("name", DAY)
def test_older_versions(version: str, name: str) -> None:
    server = Megatron(version)
    with pytest.MonkeyPatch.context() as patch:
        jobs = Jobs(server, patch)
        assert unequal(jobs(JOBS[name]), jobs.without(JOBS[name])) == []
    server.close()


@pytest.mark.nightly
def test_a_dry_run_says_how_often_layers_are_captured_and_what_is_not_counted(te: Megatron) -> None:
    flags = f"{MODERN} --train-iters 1 --global-batch-size 16 --pipeline-schedule v-half --pipeline-dry-run 2".split()
    ((status, text),) = te("outputs", 1, [*JOB, *flags, *f"{GRAPHS} 1 {ATTENTION}".split()])
    assert int(status) == 0, text
    said = re.search(r"captures the layers of a stage (\d+) times, in 4 slots, not once for each of 32", str(text))
    assert said and 4 <= int(said[1]) < 16, text
    assert "not counted: objects of CUDA graphs, " in text


def _failures() -> dict[str, str]:
    from tests.integration import graph_replay_cases, split_helpers  # which import Megatron

    return split_helpers.failures_of(graph_replay_cases.CASES)


@pytest.mark.job
def test_a_replay_hands_on_only_what_is_not_overwritten(te: Megatron) -> None:
    assert te("in_groups", 1, _failures) == [{}]
