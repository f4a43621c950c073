"""Cost files: what a plan takes from them, that the documentation has every field, and what is refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.schedules.cli.commands import main
from megatron.schedules.measure.cost_file import CustomCosts, read_costs, read_custom, read_profile
from megatron.schedules.schedule.cost_parts import HostCopies, LayerTimes, Link, MemoryShares
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.kinds import Kind
from megatron.schedules.schedule.placement import v_shape
from megatron.schedules.utils.errors import PlanError
from tests.measure.custom import custom_costs, profiled, stage, written

DOCS = (Path(__file__).parents[2] / "docs" / "measure.md").read_text()


def test_the_example_in_the_documentation_has_every_field_and_is_read():
    example = re.search(r"```json\n(.*?)```", DOCS, re.DOTALL)
    assert example is not None
    found = read_custom(example[1])
    assert all(getattr(found, name) is not None for name in CustomCosts.__struct_fields__)
    assert set(re.findall(r'^  "(\w+)"', example[1], re.MULTILINE)) == set(CustomCosts.__struct_fields__)
    assert found.added_to(found.times or Costs()) == Costs(
        LayerTimes(1.0, 1.1, 0.75, (0.2, 0.2)), link=Link(0.05), copies=HostCopies(0.7, True), memory=MemoryShares(0.4)
    )


def test_a_file_with_a_version_alone_changes_nothing(tmp_path: Path):
    found = read_costs(Path(custom_costs(tmp_path)))
    assert isinstance(found, CustomCosts)
    assert found.times is None and found.added_to(Costs.of(3, 2, 1)) == Costs.of(3, 2, 1)


def test_what_reads_measured_profiles_alone_refuses_one_written_by_hand(tmp_path: Path):
    with pytest.raises(PlanError, match=r"\$.version is version 3, and 2 is read here"):
        read_profile(Path(custom_costs(tmp_path)))


@pytest.mark.parametrize("read", [read_costs, read_profile])
def test_a_file_of_an_earlier_version_is_named_with_what_it_is_and_how_to_measure_again(read: Any, tmp_path: Path):
    path = tmp_path / "p.json"
    path.write_text('{"version": 1, "device": "a GPU", "chunk": {"layers": 2}}')
    with pytest.raises(PlanError) as refused:
        read(path)
    said = str(refused.value)
    assert said.startswith(f"{path} is no cost ") and "\n" not in said
    assert (
        "it is a profile of one chunk (version 1), which is no longer read: measure again; --pipeline-measure" in said
    )


def test_half_a_ranks_layers_take_their_measured_milliseconds(tmp_path: Path):
    profile = read_profile(written(tmp_path / "p.json"))
    assert profile.layer_seconds == pytest.approx((0.01, 0.012, 0.008))
    costs = profile.costs(ranks=4)  # 32 layers: four in half a rank
    assert costs.layers.passes == pytest.approx((40, 48, 32))
    assert (costs.link.latency, costs.memory.weight_share) == (0, 0.75)


def test_embedding_and_output_layer_that_were_measured_are_planned_for(tmp_path: Path):
    ends = [stage(0, time, time, time, held=500) for time in (1, 30)]
    on_stages = read_profile(written(tmp_path / "p.json", ends=ends)).costs(ranks=4).on(v_shape(4))
    assert on_stages.durations[Kind.F] == pytest.approx((41, *(40,) * 6, 70))
    assert on_stages.durations[Kind.I] == pytest.approx((48 + 2, *(48,) * 6, 48 + 60))
    assert on_stages.durations[Kind.W] == pytest.approx((32,) * 8)
    assert on_stages.activation == pytest.approx(((8000 + 500) / 16000, *(0.5,) * 6, (8000 + 500) / 16000))


def test_commands_read_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    asked = ["compare", "--schedule", "v-half", "--pipeline-size", "4", "--microbatches", "8", "--format", "json"]
    assert main([*asked, "--costs", str(written(tmp_path / "p.json"))]) == 0
    (measured,) = json.loads(capsys.readouterr().out)
    times = {"forward": 40, "input_grad": 48, "weight_grad": 32}
    assert main([*asked, "--costs", custom_costs(tmp_path, **times, weight_share=0.75)]) == 0
    (by_hand,) = json.loads(capsys.readouterr().out)
    assert {name: measured[name] for name in by_hand} == {
        name: pytest.approx(value) if isinstance(value, float) else value for name, value in by_hand.items()
    }


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "No such file"),
        ("forward: 1", "is no JSON"),
        ('{"model": {"layers": 3}}', "lacks 'version'"),
        (json.dumps(profiled(model={"layers": 3})), r"\$.model lacks 'hidden_size'"),
        (json.dumps(profiled(version=4)), "version 4, and 2 is read here"),
        ("[]", "is no cost profile"),
    ],
)
def test_what_is_no_profile_is_refused(text: str | None, why: str, tmp_path: Path):
    path = tmp_path / "p.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(PlanError, match=why):
        read_profile(path)


def test_the_time_of_a_copy_is_by_the_slower_way(tmp_path: Path):
    """Four layers, half a rank's, hold 8000 bytes; bytes are copied at some GB/s."""
    assert read_profile(written(tmp_path / "p.json")).copy_time(4) is None
    rates = {"to_host": 2.0, "from_host": 4.0, "both_ways": 1.6}
    profile = read_profile(written(tmp_path / "p.json", copy_gbps=rates))
    assert profile.copy_time(4) == pytest.approx(8000 / 1.6e9 * 1e3)
    assert profile.copy_time(4, both_ways=False) == pytest.approx(8000 / 2e9 * 1e3)
    assert profile.costs(4) == replace(
        read_profile(written(tmp_path / "q.json")).costs(4), copies=HostCopies(profile.copy_time(4))
    )


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
