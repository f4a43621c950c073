"""A measured stage's time and bytes are spread over layers of several kinds as estimated."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.schedules.estimate.build_flags import numbers
from megatron.schedules.estimate.device_memory import NOTHING
from megatron.schedules.estimate.model_build import TrainedModel, with_model
from megatron.schedules.estimate.models import Model, built
from megatron.schedules.estimate.times import loads
from megatron.schedules.measure.job_profile import JobProfile, Measured, StageProfile
from megatron.schedules.measure.profile_facts import Facts
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.decisions import Decisions
from megatron.schedules.schedule.kinds import Kind
from megatron.schedules.schedule.placement import sequential

FLAGS = """--hidden-size 512 --num-attention-heads 8 --seq-length 256 --vocab-size 1000 --bf16 --swiglu
    --num-experts 8 --moe-ffn-hidden-size 384 --expert-model-parallel-size 4"""
FACTS = Facts("GPU", 8, 512, 8, 256, 1, 1, 1, 1024, "bf16")
LAYERS = (2, 3, 2, 1)


def with_profile(pattern: str) -> Costs:
    args = Model("hybrid", f"{FLAGS} --hybrid-layer-pattern {pattern}").trained()
    stages = []
    for layers in LAYERS:
        times = {kind: Measured(one * layers, 0.0, 0.0) for kind, one in ((Kind.F, 10), (Kind.I, 12), (Kind.W, 6))}
        stages.append(StageProfile(layers, times, held=1000.0 * layers))
    profile = JobProfile(FACTS, "zb-1p", sequential(4), 8, (3, 5), 1, tuple(stages))
    model = TrainedModel(built(args), numbers(args), NOTHING)
    return with_model(profile.costs(4), model, shared=False, profile=profile)


def test_a_stage_takes_and_holds_what_was_measured_however_its_layers_differ() -> None:
    where = sequential(4)
    hybrid, plain = with_profile("*E-*-E*-"), with_profile("********")
    same, other = (costs.on(where, Decisions(LAYERS)) for costs in (hybrid, plain))
    for kind in (Kind.F, Kind.I, Kind.W):
        assert same.times[kind] == pytest.approx(other.times[kind])
    assert same.activation == pytest.approx(other.activation)


def test_within_a_stage_layers_differ_as_estimated() -> None:
    hybrid = with_profile("*E-*-E*-")
    estimated = loads(built(Model("hybrid", f"{FLAGS} --hybrid-layer-pattern *E-*-E*-").trained())).layers
    attention, experts = hybrid.model.layers[:2]
    for measured, other, guess, last in zip(
        attention.split, experts.split, estimated[0].split, estimated[1].split, strict=True
    ):
        assert measured / other == pytest.approx(guess / last)
    assert attention.split != experts.split
    moved = hybrid.on(sequential(4), Decisions((1, 4, 2, 1))).times[Kind.F]
    assert moved[0] / (moved[0] + moved[1]) != pytest.approx(1 / 5, rel=0.05)


def test_messages_and_attention_are_where_layers_have_them() -> None:
    costs = with_profile("*E-*-E*-")
    layers = replace(costs.layers, messages=(1.0, 1.0), attention=(0.2, 0.3))
    on_stages = replace(costs, layers=layers).on(sequential(8), Decisions((1,) * 8))
    for pattern, parts in (("E", on_stages.messages), ("*", on_stages.attention)):
        for kind in (Kind.F, Kind.I):
            assert [time > 0 for time in parts[kind]] == [symbol == pattern for symbol in "*E-*-E*-"]
            assert all(part <= time + 1e-9 for part, time in zip(parts[kind], on_stages.times[kind], strict=True))
    # Together as much as an average layer's for each layer: half a rank of eight has half a layer.
    assert sum(on_stages.messages[Kind.F]) == pytest.approx(8 * 2 * 1.0, rel=0.2)
