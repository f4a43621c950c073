"""Cost files written by hand: every field changes what is planned for, and the documentation has all of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron.schedules.measure.cost_profile import CustomCosts, read_costs, read_custom, read_profile
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.utils.errors import PlanError
from tests.measure.custom import custom_costs

DOCS = (Path(__file__).parents[2] / "docs" / "costs.md").read_text()


def test_the_example_in_the_documentation_has_every_field_and_is_read():
    example = re.search(r"```json\n(.*?)```", DOCS, re.DOTALL)
    assert example is not None
    found = read_custom(example[1])
    assert all(getattr(found, name) is not None for name in CustomCosts.__struct_fields__)
    assert set(re.findall(r'^  "(\w+)"', example[1], re.MULTILINE)) == set(CustomCosts.__struct_fields__)
    assert found.added_to(found.times or Costs()) == Costs(
        1.0,
        1.1,
        0.75,
        0.05,
        messages=(0.2, 0.2),
        stage_weights=(1.5, 1, 1, 1, 1, 1, 1, 1.2),
        stage_activations=(1, 1, 1, 1, 1, 1, 1, 1.3),
        weight_share=0.4,
        stock_recompute=1.0,
        kept=0.06,
        layer_input=0.06,
        copy=1.4,
        one_way=True,
    )


def test_a_file_with_a_version_alone_changes_nothing(tmp_path):
    found = read_costs(Path(custom_costs(tmp_path)))
    assert isinstance(found, CustomCosts)
    assert found.times is None and found.added_to(Costs(3, 2, 1)) == Costs(3, 2, 1)


def test_what_reads_measured_profiles_alone_refuses_one_written_by_hand(tmp_path):
    with pytest.raises(PlanError, match=r"\$.version is version 3, and 1 or 2 is read here"):
        read_profile(Path(custom_costs(tmp_path)))
