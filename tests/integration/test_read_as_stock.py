"""Values of Megatron's flags that are read before Megatron is imported: as Megatron reads them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.num_microbatches_calculator import StepBatchsizeNumMicroBatchesCalculator
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from megatron.schedules.job.stage_layers import layout_stages
from megatron.schedules.job.values import batch_steps
from megatron.schedules.utils.errors import PlanError

LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
PARTS = st.sampled_from(["E", "t", "tt", "m", "L", "|", ",", "(", ")", "*2", "*11", "*0", "(t|)*3", "(tt|t)*2", "x"])
NUMBERS = st.sampled_from(["0", "4", "1.5", "8k", "2.5M", "3B", "1T", " 7 ", "1e3", "x", "", "-1", "K"])


def of_stock(layout: str) -> list[str] | None:
    """What Megatron reads in a layout; None where it refuses it."""
    try:
        stages = PipelineParallelLayerLayout.parse_str_to_list(layout)
    except AssertionError:
        return None
    return ["".join(LETTERS[layer.name] for layer in stage) for stage in stages]


@given(st.lists(PARTS, max_size=12).map("".join))
def test_a_layout_has_the_stages_that_megatron_reads(layout: str):
    try:
        stages: list[str] | None = layout_stages(layout)
    except PlanError:
        stages = None
    assert stages == of_stock(layout)


def test_a_layout_with_more_layers_than_any_model_is_refused_at_once():
    with pytest.raises(PlanError, match="cannot read --pipeline-model-parallel-layout"):
        layout_stages("Et*999999999999|L")


@given(st.lists(st.tuples(NUMBERS, st.sampled_from([":", ":", ""]), NUMBERS).map("".join), max_size=4).map(" ".join))
def test_batch_sizes_by_step_are_those_that_megatron_reads(steps: str):
    try:
        batches = [size for _, size in StepBatchsizeNumMicroBatchesCalculator._parse_schedule(steps, None)]
    except ValueError:
        batches = []
    try:
        assert batch_steps("--flag", steps) == batches
    except PlanError:
        assert not batches
