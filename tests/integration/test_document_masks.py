"""What layers take from a batch reaches the stages in the middle too: masks that keep documents apart, above all."""

from __future__ import annotations

import pytest

from tests import tolerances
from tests.integration.features import each_setting
from tests.integration.test_same_result import CLIP_NOTHING, assert_same_losses, differing, under

JOB = ("--train-iters", "3", "--global-batch-size", "4", "--reset-attention-mask", "--reset-position-ids")
JOB += ("--eod-mask-loss", *CLIP_NOTHING)
PP2, PP4 = (("--pipeline-model-parallel-size", size) for size in "24")
MTP = ("--mtp-num-layers", "1", "--position-embedding-type", "rope", "--no-rope-fusion")
# Ranks, the pipeline, other flags, those of the model.
SETTINGS = {
    "documents apart": (2, PP2, (), ()),
    "documents apart, four ranks": (4, PP4, (), ()),
    "documents apart, tensor parallel": (4, PP2, ("--tensor-model-parallel-size", "2", "--sequence-parallel"), ()),
    "documents apart, multi-token prediction": (2, PP2, (), MTP),
}
USUAL = {
    "documents apart": ("v-half",),
    "documents apart, four ranks": ("zb-1p",),
    "documents apart, tensor parallel": ("v-half",),
    "documents apart, multi-token prediction": ("v-half",),
}


@pytest.mark.parametrize(("setting", "schedule"), each_setting(SETTINGS, USUAL))
def test_documents_stay_apart_on_every_stage(train, setting, schedule):
    """Stock is right on two ranks of one stage each, both of which read data."""
    world, pipeline, flags, model = SETTINGS[setting]
    one = train.stock(1, *JOB, model=model, samples="documents")
    ours = train(world, *JOB, *pipeline, *flags, *under(schedule), model=model, samples="documents")
    assert_same_losses(ours, one, tolerances.OTHER_KERNELS if flags else tolerances.SAME_KERNELS)
    stock = train.stock(2 if not flags else 4, *JOB, *PP2, *flags, model=model, samples="documents")
    assert differing(ours, stock) == []
