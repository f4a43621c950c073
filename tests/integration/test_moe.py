"""Mixtures of experts, their experts spread over ranks: losses and gradients against stock Megatron's own."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch

from megatron.schedules.job.flags import SEARCH_VARIABLE
from megatron.schedules.planner.registry import Request, plan
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.kinds import Pass
from megatron.schedules.schedule.placement import sequential
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.text_forms import to_csv
from tests.integration.conftest import Training
from tests.integration.features import FULL, MOE, each_setting
from tests.integration.results import MODEL
from tests.integration.server import Megatron
from tests.integration.test_same_result import CLIP_NOTHING, assert_same_losses, differing, under
from tests.integration.test_with_plain_attention import MLA
from tests.tiers import by_night

HIDDEN = "--overlap-moe-expert-parallel-comm --delay-wgrad-compute"
JOB = ("--train-iters", "2", "--global-batch-size", "8", "--pipeline-model-parallel-size", "2", *CLIP_NOTHING)
EXPERTS = f"--moe-token-dispatcher-type alltoall --swiglu --disable-bias-linear {MOE}"
GATHERED = f"{EXPERTS.replace('alltoall', 'allgather')} --moe-z-loss-coeff 1e-3"
SHARED_EXPERT = "--moe-shared-expert-intermediate-size 32"
SHARED = f"{EXPERTS} {SHARED_EXPERT}"
EP2 = "--expert-model-parallel-size 2"
# There is no GPU: tests/integration/fake_deep_ep.py takes the place of both libraries.
DEEP_EP, HYBRID_EP = (
    f"--moe-token-dispatcher-type flex --moe-router-dtype fp32 --moe-flex-dispatcher-backend {library}"
    for library in ("deepep", "hybridep")
)
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1"
OVERLAPPED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
PACKED = "--dataloader-inter-document-masking"
BIAS = "--moe-router-score-function sigmoid --moe-router-enable-expert-bias"
SPARSE = "--moe-layer-freq ([0,1]*4) --moe-ffn-hidden-size 64"

# Each: the number of ranks, the flags that say what parameters there are, the other flags.
SETTINGS = {
    "expert parallel 2": (4, EXPERTS, EP2),
    "expert parallel 2, allgather, z-loss, loss per token": (4, GATHERED, f"{EP2} --calculate-per-token-loss"),
    "expert parallel 2 over tensor ranks, shared expert": (4, SHARED, f"{EP2} {TP2}"),
    "expert parallel 2, shared expert, distributed optimizer, overlapped": (4, SHARED, f"{EP2} {OVERLAPPED}"),
    "expert parallel 2, shared expert, full recompute": (4, SHARED, f"{EP2} {FULL} uniform --recompute-num-layers 1"),
    "experts in every second layer": (2, f"{EXPERTS} {SPARSE}", ""),
    "expert bias, multi-latent attention, shared expert": (4, f"{SHARED} {BIAS} {MLA}", EP2),
}


# Messages of experts hidden behind weight gradients: the number of ranks, the model, the other flags.
HIDING = {
    "expert parallel 2, hidden messages": (4, EXPERTS, EP2),
    "expert parallel 2 over tensor ranks, shared expert, hidden messages": (4, SHARED, f"{EP2} {TP2}"),
    "expert parallel 2, distributed optimizer, overlapped, hidden messages": (4, SHARED, f"{EP2} {OVERLAPPED}"),
    "expert parallel 2, full recompute, hidden messages": (4, SHARED, f"{EP2} {FULL} uniform --recompute-num-layers 1"),
    "expert parallel 2, router losses, loss per token, hidden messages": (
        4,
        f"{EXPERTS} --moe-z-loss-coeff 1e-3",
        f"{EP2} --calculate-per-token-loss",
    ),
    "expert parallel 2, packed documents, hidden messages": (4, SHARED, f"{EP2} {PACKED}"),
    "expert parallel 2, allgather, z-loss, hidden messages": (4, f"{GATHERED} {SHARED_EXPERT}", EP2),
    "expert parallel 2 over tensor ranks, allgather, hidden messages": (4, GATHERED, f"{EP2} {TP2}"),
    "expert parallel 2, DeepEP, hidden messages": (4, SHARED, f"{EP2} {DEEP_EP}"),
    "expert parallel 2 over tensor ranks, DeepEP, hidden messages": (4, EXPERTS, f"{EP2} {TP2} {DEEP_EP}"),
    "expert parallel 2, HybridEP, hidden messages": (4, SHARED, f"{EP2} {HYBRID_EP}"),
}
SPLITTING = ("zb-1p", "v-min", "v-half", "v-zb", "adaptive", "late")
HIDING_USUAL = {
    ("expert parallel 2, hidden messages", "v-half"),
}
# Those that the page on compatibility names.
HIDING_SHOWN = {
    ("expert parallel 2, hidden messages", "zb-1p"),
    ("expert parallel 2, hidden messages", "v-half"),
    ("expert parallel 2, distributed optimizer, overlapped, hidden messages", "v-zb"),
}


@pytest.mark.parametrize(("setting", "schedule"), each_setting(SETTINGS, {}))
def test_the_result_is_stocks(train: Training, setting: str, schedule: str) -> None:
    """To the bit, weights after two steps too; a distributed optimizer leaves no whole gradients to compare."""
    world, model, flags = SETTINGS[setting]
    assert_stocks(train, world, model, flags, schedule)


def _marks(setting: str, schedule: str) -> list[pytest.MarkDecorator]:
    shown = [pytest.mark.feature("hidden messages of experts")] * ((setting, schedule) in HIDING_SHOWN)
    return shown + [pytest.mark.nightly] * ((setting, schedule) not in HIDING_USUAL)


@pytest.mark.job
@pytest.mark.parametrize(
    ("setting", "schedule"), [pytest.param(*case, marks=_marks(*case)) for case in product(HIDING, SPLITTING)]
)
def test_hidden_messages_change_no_result(train: Training, tmp_path: Path, setting: str, schedule: str) -> None:
    world, model, flags = HIDING[setting]
    assert_stocks(train, world, model, flags, _asked(schedule, tmp_path, flags), HIDDEN)


@pytest.mark.nightly
def test_auto_may_leave_nothing_to_hide_messages_behind(train: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    """By these costs a split saves nothing."""
    monkeypatch.setenv(SEARCH_VARIABLE, "0.1")
    job, model = (*JOB, *EP2.split(), "--global-batch-size", "16"), tuple(EXPERTS.split())
    ours = train(4, *job, *HIDDEN.split(), "--pipeline-costs", "1,2,1e-6", *under("auto"), model=model)
    assert "B" in ours.passes and not {"I", "W"} & ours.passes
    assert differing(ours, train.stock(4, *job, model=model)) == []


@pytest.mark.parametrize(
    ("model", "flags", "schedule"),
    [
        (EXPERTS, EP2, "late"),
        by_night(SHARED, f"{EP2} {TP2}", "v-half"),
        by_night(GATHERED, EP2, "late"),
        by_night(EXPERTS, f"{EP2} {DEEP_EP}", "late"),
        by_night(EXPERTS, f"{EP2} {HYBRID_EP}", "late"),
    ],
)
def test_weight_gradients_run_behind_messages_once_and_in_order(
    megatron: Megatron, tmp_path: Path, model: str, flags: str, schedule: str
) -> None:
    order = _asked(schedule, tmp_path, flags)
    if schedule != "late":  # by name it would be planned for these messages in one of the two jobs only
        order = str(tmp_path / "named.csv")
        costs = Costs.parse("1,1.1,0.75,0.05,0.3")
        Path(order).write_text(to_csv(plan(Request(schedule, 2, _microbatches(flags), costs))))
    job = [*MODEL, *JOB, *model.split(), *flags.split(), *under(order)]
    hidden = megatron("behind_messages", 4, [*job, *HIDDEN.split()])
    plain = megatron("behind_messages", 4, job)
    for ours, without in zip(hidden, plain, strict=True):
        assert without.behind == [], "without the flag stock sends its messages itself"
        whole = sum(map(len, without.added.values()))
        # Those of the last microbatch stay in W.
        assert sum(ours.behind) == whole - whole // _microbatches(flags) if schedule == "late" else sum(ours.behind) > 0
        # For each parameter the microbatches whose gradients are added, in order.
        assert sorted(ours.added.values()) == sorted(without.added.values())


@pytest.mark.nightly
def test_as_many_run_behind_messages_as_the_plan_says(megatron: Megatron, tmp_path: Path) -> None:
    """By the costs given here messages take no time, although this job's take longer than its weight gradients."""
    asked = under(_asked("late", tmp_path, EP2))
    job = [*MODEL, *JOB, *EXPERTS.split(), *EP2.split(), *asked, *HIDDEN.split(), "--pipeline-costs"]
    for costs, hides in (("1,1.1,.75,.05,1e-6", False), ("1,1.1,.75,.05,.9", True)):
        found = megatron("behind_messages", 4, [*job, costs])
        assert all(each.behind and any(each.behind) == hides for each in found), costs


def _asked(schedule: str, folder: Path, flags: str) -> str:
    """The schedule's name, or the file with the schedule in which every W is at the end: so all may be due."""
    if schedule != "late":
        return schedule
    n = _microbatches(flags)
    first = ["0F0", *(f"0{kind}{m - (kind == 'I')}" for m in range(1, n) for kind in "FI"), f"0I{n - 1}"]
    second = [f"1{kind}{m}" for m in range(n) for kind in "FI"]
    order = [*first, *(f"0W{m}" for m in range(n))], [*second, *(f"1W{m}" for m in range(n))]
    written = Schedule("late", sequential(2), n, tuple(tuple(map(Pass.parse, row)) for row in order))
    (folder / "late.csv").write_text(to_csv(written))
    return str(folder / "late.csv")


def _microbatches(flags: str) -> int:
    """Of eight samples, on four ranks with a pipeline of two."""
    return 8 if "--tensor-model-parallel-size 2" in flags else 4


def assert_stocks(train: Training, world: int, model: str, flags: str, schedule: str, ours_alone: str = "") -> None:
    """The job's losses, gradients and weights are those of stock's to the bit."""
    job, how = (*JOB, *flags.split()), {"attention": "plain" if MLA in model else "stock"}
    how["samples"] = "packed" if PACKED in flags else "plain"
    ours = train(world, *job, *ours_alone.split(), *under(schedule), model=tuple(model.split()), **how)
    stock = train.stock(world, *job, model=tuple(model.split()), **how)
    assert_same_losses(ours, stock)
    assert "--use-distributed-optimizer" in job or differing(ours, stock) == []
    assert ours.weights.keys() == stock.weights.keys()
    assert [str(k) for k, v in stock.weights.items() if not torch.equal(v, ours.weights[k])] == []
