"""Cost profiles: what a plan takes from them, and what is no profile."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.schedules.cli.commands import main
from megatron.schedules.measure.cost_profile import read_profile
from megatron.schedules.schedule.decisions import Decisions
from megatron.schedules.schedule.kinds import Kind, Share
from megatron.schedules.schedule.placement import v_shape
from megatron.schedules.utils.errors import PlanError
from tests.measure.custom import PASSES, custom_costs, written

ENDS = {"embedding": 0.001, "output_layer": 0.03}


def test_half_a_ranks_layers_take_their_measured_milliseconds(tmp_path: Path):
    profile = read_profile(written(tmp_path / "p.json"))
    assert profile.layer_seconds == pytest.approx((0.01, 0.012, 0.008))
    costs = profile.costs(ranks=4)  # 32 layers: four in half a rank
    assert (costs.forward, costs.input_grad, costs.weight_grad) == pytest.approx((40, 48, 32))
    assert (costs.comm, costs.weight_share) == (0, 0.75)


def test_more_may_wait_for_a_w_than_for_its_i(tmp_path: Path):
    chunk = {"layers": 2, "activation_bytes": 4000, "weight_bytes": 5000}
    times = {name: {"median": 0.02, "low": 0.02, "high": 0.02} for name in PASSES}
    assert read_profile(written(tmp_path / "p.json", chunk=chunk | times)).costs(4).weight_share == 1.25


def test_ends_that_were_measured_are_planned_for(tmp_path: Path):
    ends = {name: {kind: {"median": s} for kind in PASSES} | {"activation_bytes": 500} for name, s in ENDS.items()}
    costs = read_profile(written(tmp_path / "p.json", **ends)).costs(ranks=4)
    on_stages = costs.on(v_shape(4))
    assert on_stages.durations[Kind.F] == pytest.approx((41, *(40,) * 6, 70))
    assert on_stages.durations[Kind.I] == pytest.approx((48 + 2, *(48,) * 6, 48 + 60))
    assert on_stages.durations[Kind.W] == pytest.approx((32,) * 8)
    assert on_stages.activation == pytest.approx(((8000 + 500) / 16000, *(0.5,) * 6, (8000 + 500) / 16000))


@pytest.mark.parametrize("command", ["plan", "compare"])
def test_commands_read_it(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = str(written(tmp_path / "p.json"))
    size = ["--schedule", "v-half", "--pipeline-size", "4", "--microbatches", "8", "--format", "json"]
    assert main([command, *size, "--costs", file]) == 0
    measured = capsys.readouterr().out
    times = {"forward": 40, "input_grad": 48, "weight_grad": 32}
    assert main([command, *size, "--costs", custom_costs(tmp_path, **times, weight_share=0.75)]) == 0
    assert measured == capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "No such file"),
        ("forward: 1", "is no JSON"),
        ('{"model": {"layers": 3}}', "lacks 'version'"),
        ('{"version": 1, "device": "a GPU", "model": {"layers": 3}}', r"\$.model lacks 'hidden_size'"),
        ("[]", "is no cost profile"),
    ],
)
def test_what_is_no_profile_is_refused(text: str | None, why: str, tmp_path: Path):
    path = tmp_path / "p.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(PlanError, match=why):
        read_profile(path)


def test_another_version_is_refused(tmp_path: Path):
    with pytest.raises(PlanError, match="version 3, and 1 or 2 is read here"):
        read_profile(written(tmp_path / "p.json", version=3))


def test_the_time_of_a_copy_is_by_the_slower_way(tmp_path: Path):
    """Two layers hold 4000 bytes, four are half a rank's; bytes are copied at some GB/s."""
    assert read_profile(written(tmp_path / "p.json")).copy_time(4) is None
    rates = {"to_host": 2.0, "from_host": 4.0, "both_ways": 1.6}
    profile = read_profile(written(tmp_path / "p.json", copy_gbps=rates))
    assert profile.copy_time(4) == pytest.approx(8000 / 1.6e9 * 1e3)
    assert profile.copy_time(4, both_ways=False) == pytest.approx(8000 / 2e9 * 1e3)
    assert profile.costs(4) == replace(read_profile(written(tmp_path / "q.json")).costs(4), copy=profile.copy_time(4))


def test_a_forward_done_again_takes_what_was_measured_and_leaves_its_input(tmp_path: Path):
    plain = json.loads(written(tmp_path / "p.json").read_text())["chunk"]
    chunk = plain | {"recompute": {"median": 0.021}, "input_bytes": 500}
    costs = read_profile(written(tmp_path / "p.json", chunk=chunk)).costs(4)
    assert (costs.recompute_time, costs.layer_input) == pytest.approx((1.05, 0.125))
    on_stages = costs.on(v_shape(4), Decisions(recomputed=(0.5,) * 8))
    assert on_stages.durations[Kind.R] == pytest.approx((0.5 * 1.05 * 40,) * 8)
    # Half of a stage's layers, each but an eighth of it; a stage is half a rank.
    assert on_stages.held[Share.RECOMPUTED] == pytest.approx((0.5 * 0.875 * 0.5,) * 8)
    for wrong, why in (
        ({"recompute": {"median": -1.0}}, r"\$.chunk.recompute.median must be a number >= 1e-15, not -1"),
        ({"input_bytes": 4001}, r"\$.chunk.input_bytes must be 4000 at most.* keeps no more than its forward holds"),
        ({"input_bytes": -1}, r"\$.chunk.input_bytes must be a number >= 0.0, not -1"),
    ):
        with pytest.raises(PlanError, match=why):
            read_profile(written(tmp_path / "p.json", chunk=chunk | wrong))


@pytest.mark.parametrize(
    ("rates", "why"),
    [
        ({"to_host": 1}, "lacks 'from_host'"),
        ({"to_host": 1, "from_host": 0, "both_ways": 1}, r"\$.copy_gbps.from_host must be a number >= 1e-15, not 0"),
        (3, r"\$.copy_gbps must be an object, not a whole number"),
    ],
)
def test_rates_that_are_none_are_refused(tmp_path: Path, rates: Any, why: str):
    with pytest.raises(PlanError, match=why):
        read_profile(written(tmp_path / "p.json", copy_gbps=rates))
