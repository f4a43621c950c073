"""What a Megatron user may have switched on: every feature, the flags that ask for it, and how it is compared.

The factors are what people combine freely; a test runs each of stock's values alone under each schedule, and pairs of
all of them together. What cannot be had without a GPU is listed with the reason.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import NamedTuple

import covertable
import pytest
from _pytest.mark import ParameterSet

from tests.tiers import some_by_night

SCHEDULES = ("zb-1p", "v-min", "v-half", "v-zb", "adaptive", "interleaved-1f1b")
CHUNKS = {"zb-1p": 1, "adaptive": 4}  # of eight layers on two ranks; two where nothing is said


class Feature(NamedTuple):
    """Something that a flag switches on.

    Args:
        flags: stock's own.
        ranks: processes for each pipeline rank.
        needs: features without which it means nothing, or a schedule.
        layout: whether the flags say which layers a stage holds, so that they depend on the schedule.
        ours: flags of ours, which stock's run does not have.
        passes: kinds of pass that it adds.
    """

    flags: str = ""
    ranks: int = 1
    needs: tuple[str, ...] = ()
    layout: bool = False
    ours: str = ""
    passes: str = ""


MOE = "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 1e-2 --moe-router-load-balancing-type aux_loss"
MODERN = "--position-embedding-type rope --no-rope-fusion --swiglu --disable-bias-linear --normalization RMSNorm"
FULL = "--recompute-granularity full --recompute-method"
TENSOR = "--tensor-model-parallel-size 2"
OVERLAP = "--overlap-grad-reduce"
MOE_ALLTOALL = f"--moe-token-dispatcher-type alltoall {MOE}"

FACTORS: dict[str, dict[str, Feature]] = {
    "model": {
        "GPT": Feature(),
        "RoPE + SwiGLU + RMSNorm": Feature(MODERN),
        "grouped-query attention": Feature("--group-query-attention --num-query-groups 2"),
        "qk-layernorm": Feature("--qk-layernorm"),
        "mixture of experts": Feature(f"{MODERN} {MOE_ALLTOALL}"),
        "multi-token prediction": Feature("--mtp-num-layers 1 --position-embedding-type rope --no-rope-fusion"),
    },
    "parallel": {
        "pipeline alone": Feature(),
        "tensor parallel 2": Feature(TENSOR, 2),
        "tensor and sequence parallel 2": Feature(f"{TENSOR} --sequence-parallel", 2),
        "data parallel 2": Feature(ranks=2),
        "tensor and data parallel 2": Feature(f"{TENSOR} --sequence-parallel", 4),
        "expert parallel 2": Feature("--expert-model-parallel-size 2", 2, needs=("mixture of experts",)),
    },
    "optimizer": {
        "plain": Feature(),
        "gradient clipping": Feature("--clip-grad 0.1"),
        "overlapped gradient reduction": Feature(OVERLAP),
        "distributed optimizer": Feature("--use-distributed-optimizer"),
        "distributed optimizer, overlapped": Feature(f"--use-distributed-optimizer {OVERLAP} --overlap-param-gather"),
    },
    "numbers": {
        "fp32": Feature(),
        "bf16": Feature("--bf16"),
        "fp16 with overflows": Feature("--fp16 --initial-loss-scale 4294967296 --hysteresis 1"),
    },
    "recompute": {
        "none": Feature(),
        "selective recompute": Feature("--recompute-granularity selective"),
        "full recompute": Feature(f"{FULL} uniform --recompute-num-layers 1"),
        "full recompute of one layer a stage": Feature(f"{FULL} block --recompute-num-layers 1"),
    },
    "layers": {
        "even": Feature(),
        "fewer layers at the ends": Feature(layout=True),
        "layout string, ends without a layer": Feature(layout=True),
    },
    "more": {
        "nothing": Feature(),
        "tied embeddings": Feature(),
        "loss per token": Feature("--calculate-per-token-loss"),
        "dropout": Feature("--attention-dropout 0.1 --hidden-dropout 0.1"),
        # What stock has for its --rampup-batch-size, which it accepts and ignores: so many from so many tokens on.
        "batch size ramp-up": Feature("--step-batch-size-schedule '0:4 128:8' --train-samples 20"),
    },
}
SAVED = "--pipeline-memory-limit 0.4 --pipeline-costs 4,4,3 --pipeline-save-memory"
OWN_LOOP = "a training loop of one's own"
# What is ours, and no flag of stock's.
OURS: dict[str, dict[str, Feature]] = {
    "saving": {
        "all kept": Feature(),
        "recompute as passes": Feature(needs=("adaptive",), ours=f"{SAVED} recompute", passes="R"),
        "offload as passes": Feature(needs=("adaptive",), ours=f"{SAVED} offload=0.1", passes="O"),
    },
    "loop": {"Megatron-LM's loop": Feature(), OWN_LOOP: Feature()},
}
ALL_FACTORS = FACTORS | OURS
USUAL = tuple(next(iter(values)) for values in ALL_FACTORS.values())  # the first of each factor asks for nothing
FEATURES = {name: feature for values in ALL_FACTORS.values() for name, feature in values.items() if name not in USUAL}

# What stock refuses together, and what leaves nothing of whole layers to recompute or to offload.
APART = (
    {"mixture of experts", "tensor parallel 2"},  # it wants sequence parallelism too
    {"multi-token prediction", "tied embeddings"},  # docs/upstream.md
    {OWN_LOOP, "fewer layers at the ends"},  # of several chunks, where the loop sets their number
    {"recompute as passes", "full recompute"},
    {"recompute as passes", "full recompute of one layer a stage"},
    {"offload as passes", "full recompute"},
    {"offload as passes", "full recompute of one layer a stage"},
)

NEEDS_GPU = {
    "Transformer Engine's kernels": "its Python runs over plain torch",
    "CUDA streams of messages (NCCL)": "tests talk over gloo",
}


class Case(NamedTuple):
    """A schedule with features that are on together."""

    schedule: str
    features: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.schedule}, {', '.join(self.features) or 'nothing more'}"

    @property
    def model(self) -> list[str]:
        """Those of stock's flags that say which parameters the model has."""
        return self._words(FEATURES[name].flags for name in self.features if name in FACTORS["model"])

    @property
    def flags(self) -> list[str]:
        """Stock's other flags, without those that place layers."""
        return self._words(FEATURES[name].flags for name in self.features if name not in FACTORS["model"])

    @property
    def ours(self) -> list[str]:
        """Flags of ours, and the number of chunks if it is the loop that says it."""
        chunks = CHUNKS.get(self.schedule, 2)
        say = self.owns_loop and chunks > 1 and not self.layout
        virtual = ["--num-virtual-stages-per-pipeline-rank", str(chunks)] * say
        asked = self._words(FEATURES[name].ours for name in self.features)
        usual = ["--pipeline-memory-limit", "1"] * (self.schedule == "adaptive" and not asked)
        return ["--pipeline-schedule", self.schedule, *virtual, *usual, *asked]

    @property
    def owns_loop(self) -> bool:
        """Whether the loop is the user's own."""
        return OWN_LOOP in self.features

    @property
    def passes(self) -> set[str]:
        """Kinds of pass that such a run has, other than F and backwards."""
        return {FEATURES[name].passes for name in self.features} - {""}

    @staticmethod
    def _words(flags: Iterable[str]) -> list[str]:
        return shlex.split(" ".join(flags))

    @property
    def tied(self) -> bool:
        """Whether embedding and output layer share their weights."""
        return "tied embeddings" in self.features

    @property
    def world(self) -> int:
        """How many ranks it takes with a pipeline of two."""
        return 2 * max([FEATURES[name].ranks for name in self.features], default=1)

    @property
    def layout(self) -> list[str]:
        """Stock's flags that say which layers the stages hold."""
        chunks = CHUNKS.get(self.schedule, 2)
        if "fewer layers at the ends" in self.features:
            ends = ["--decoder-first-pipeline-num-layers", "1"]
            return ends + ["--decoder-last-pipeline-num-layers", "1"] * (chunks > 1)
        if "layout string, ends without a layer" in self.features:
            written = {1: "E|ttttttttL", 2: "E|tttt|tttt|L", 4: "E|t|t|t|t|tt|tt|L"}[chunks]
            if "multi-token prediction" in self.features:
                written = written.replace("L", "mL")
            return ["--pipeline-model-parallel-layout", written]
        return []

    @property
    def possible(self) -> bool:
        """Whether there is such a run: a value for each factor, and nothing that stock refuses together."""
        on = {self.schedule, *self.features}
        if any(len(on & values.keys()) > 1 for values in ALL_FACTORS.values()):
            return False
        wanting = any(needed not in on for name in self.features for needed in FEATURES[name].needs)
        return not (wanting or any(both <= on for both in APART))


def each_schedule(*usual: str) -> list[ParameterSet]:
    """Parameters of a test: ``usual`` schedules always, the others when the full matrix is asked for."""
    return some_by_night(SCHEDULES, lambda name: name not in usual)


def each_setting(settings: Iterable[str], usual: Mapping[str, Sequence[str]]) -> list[ParameterSet]:
    """Parameters ``setting, schedule`` of a test: every pair, those not ``usual`` when the full matrix is asked for."""
    pairs = []
    for setting, schedule in product(settings, SCHEDULES):
        rare = () if schedule in usual.get(setting, ()) else (pytest.mark.nightly,)
        pairs.append(pytest.param(setting, schedule, marks=(pytest.mark.feature(setting), *rare)))
    return pairs


def alone() -> list[Case]:
    """Every feature of stock's under every schedule."""
    cases = []
    for name, feature in FEATURES.items():
        if not any(name in values for values in OURS.values()):
            cases += [Case(schedule, (*feature.needs, name)) for schedule in SCHEDULES]
    return cases


def together() -> list[Case]:
    """Few cases in which every schedule meets every feature, and every feature every other that it can go with."""
    factors = {"schedule": SCHEDULES, **{name: tuple(values) for name, values in ALL_FACTORS.items()}}
    factor_of = {name: factor for factor, values in factors.items() for name in values}

    def chosen(name: str) -> dict[str, object]:
        return {"operator": "eq", "left": factor_of[name], "value": name}

    def without(*names: str) -> dict[str, object]:
        return {"operator": "not", "condition": {"operator": "and", "conditions": [chosen(name) for name in names]}}

    rules = [without(*both) for both in APART]
    for name, feature in FEATURES.items():
        rules += [{"operator": "or", "conditions": [without(name), chosen(needed)]} for needed in feature.needs]
    rows = covertable.make(factors, constraints=rules)
    return [Case(row["schedule"], tuple(row[f] for f in ALL_FACTORS if row[f] in FEATURES)) for row in rows]
