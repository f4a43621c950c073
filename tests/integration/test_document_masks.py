"""What layers take from a batch reaches the stages in the middle too: masks that keep documents apart, above all."""

from __future__ import annotations

import pytest
import torch

from tests import tolerances
from tests.integration.features import each_setting
from tests.integration.results import MODEL, UNTIED, Call
from tests.integration.test_core_loops import gradients, same
from tests.integration.test_same_result import CLIP_NOTHING, assert_same_losses, differing, under
from tests.tiers import by_night

JOB = ("--train-iters", "3", "--global-batch-size", "4", "--reset-attention-mask", "--reset-position-ids")
JOB += ("--eod-mask-loss", *CLIP_NOTHING)
PP2, PP4 = (("--pipeline-model-parallel-size", size) for size in "24")
APART = "documents kept apart (--reset-attention-mask)"
MTP = ("--mtp-num-layers", "1", "--position-embedding-type", "rope", "--no-rope-fusion")


@pytest.mark.job
@pytest.mark.parametrize(("setting", "schedule"), each_setting([APART], {APART: ("v-half",)}))
def test_documents_stay_apart_on_every_stage(train, setting, schedule):
    """Stock keeps them apart on two ranks of one stage each, both of which read data."""
    ours = train(2, *JOB, *PP2, *under(schedule), samples="documents")
    assert_same_losses(ours, train.stock(1, *JOB, samples="documents"))
    assert differing(ours, train.stock(2, *JOB, *PP2, samples="documents")) == []


# Ranks, schedule, other flags, those of the model.
OTHERS = {
    "four ranks": (4, "zb-1p", PP4, ()),
    "four ranks, stock's schedule": (4, None, PP4, ()),
    "tensor parallel": (4, "v-half", (*PP2, "--tensor-model-parallel-size", "2", "--sequence-parallel"), ()),
    "multi-token prediction": (2, "v-half", PP2, MTP),
    "vocabulary parallel": (4, "1f1b", (*PP4, "--pipeline-vocabulary-parallel"), ()),
}


@pytest.mark.parametrize("other", OTHERS)
def test_documents_stay_apart_with(train, other):
    world, schedule, flags, model = OTHERS[other]
    ours = train(world, *JOB, *flags, *(under(schedule) if schedule else ()), model=model, samples="documents")
    one = train.stock(1, *JOB, model=model, samples="documents")
    assert_same_losses(ours, one, tolerances.OTHER_KERNELS)
    if "--tensor-model-parallel-size" not in flags and "--pipeline-vocabulary-parallel" not in flags:
        assert differing(ours, train.stock(2, *JOB, *PP2, model=model, samples="documents")) == []


def test_a_resumed_job_reads_on_where_the_other_stopped_on_every_stage(train, tmp_path):
    job = (*JOB, *PP2, *under("v-half"))
    whole = train(2, *job, "--save", str(tmp_path), "--save-interval", "2", samples="documents")
    resumed = train.resume(2, *job, load=tmp_path, iteration=2, samples="documents")
    assert resumed.losses == whole.losses[2:] and resumed.evaluations == whole.evaluations


@pytest.mark.parametrize(
    ("schedule", "world", "flags"),
    [
        ("v-half", 4, ("--tensor-model-parallel-size", "2", "--sequence-parallel")),
        by_night("adaptive", 2, ()),
    ],
)
def test_a_script_that_asks_megatron_where_to_read_reads_on_every_stage(train, schedule, world, flags):
    stock = train(world, *JOB, *PP2, *flags, samples="Megatron says")
    ours = train(world, *JOB, *PP2, *flags, *under(schedule), samples="Megatron says")
    assert_same_losses(ours, stock)
    assert differing(ours, stock) == []


def test_a_script_that_reads_at_the_ends_alone_is_refused_before_the_first_update(train, megatron):
    flags = [*MODEL, *UNTIED, *JOB, *PP2, *under("v-half")]
    (status, printed), _ = megatron("outputs", 2, flags, script="at the ends")
    assert status == 2 and "iteration        1" not in printed
    assert "passes attention_mask to the layers of stage 0 and none to those of stage 1, which read it" in printed


def test_a_script_that_reads_masks_at_the_ends_may_if_they_are_what_attention_assumes(train):
    job = [flag for flag in JOB if flag != "--reset-attention-mask"]
    ours = train(2, *job, *PP2, *under("v-half"), samples="at the ends")
    assert_same_losses(ours, train.stock(2, *job, *PP2, samples="at the ends"))


EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_aux_loss_coeff": 0.5, "add_bias_linear": False}
V_HALF = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}, {"schedule": "v-half"}
CALLS = (Call(3, seed=1),)


@pytest.mark.parametrize(
    ("passed", "everywhere", "options"),
    [("documents", True, {}), ("padding", True, EXPERTS), ("causal", False, {})],
    ids=["a mask of documents", "padding of experts", "a causal mask at the ends"],
)
def test_any_loop_passes_its_masks_on_every_stage(megatron, passed, everywhere, options):
    ours = megatron("core_loop", *V_HALF, CALLS, passed=passed, everywhere=everywhere, **options)
    stock = megatron("core_loop", {"pipeline_model_parallel_size": 2}, None, CALLS, passed=passed, **options)
    found, expected = gradients(ours, 0), gradients(stock, 0)
    assert same(ours[-1][0].results, stock[-1][0].results)
    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []


@pytest.mark.job
@pytest.mark.parametrize(
    ("passed", "options", "name"), [("documents", {}, "attention_mask"), ("padding", EXPERTS, "padding_mask")]
)
def test_a_loop_that_passes_a_mask_at_the_ends_alone_is_refused_in_its_first_call(megatron, passed, options, name):
    first, other = megatron("core_loop_refusals", *V_HALF, CALLS, passed=passed, everywhere=False, **options)
    assert f"passes {name} to the layers of stage 0 and none to those of stage 1, which read it" in first
    assert first.count("\n") == 1 and other in ("", first)


def test_a_stage_without_the_bounds_of_packed_samples_is_named(megatron):
    packed, none = {"packed_seq_params"}, set()
    assert megatron("input_difference", [(packed, none), (packed, none)]) == ""
    assert megatron("input_difference", [(none, packed), (none, packed)]) == ""
    assert megatron("input_difference", [(packed, {"padding_mask"}), (none, packed), (packed, none)]) == (
        "the forward step passes packed_seq_params to the layers of stage 0 and none to those of stage 1, which read "
        "it too: pass it on every stage (docs/loops.md), or on none"
    )
