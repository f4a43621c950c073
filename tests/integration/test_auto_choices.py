"""What ``--pipeline-schedule auto`` may choose of a job, as its flags leave it open."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.schedules.estimate.device_memory import Numbers
from megatron.schedules.estimate.models import MODELS
from megatron.schedules.estimate.parallel_sizes import Sizes
from megatron.schedules.integration.flags.automatic import choices
from megatron.schedules.job.spec import JobSpec, Model, Settings, StockLayers
from megatron.schedules.job.values import ScheduleChoice

BUILD = MODELS["9.6B"].whole
MODEL = Model(BUILD, Numbers(2, 4, 12))


@pytest.mark.parametrize(
    ("flag", "stock", "chosen"),
    [
        (None, StockLayers(30), "auto"),
        ("even", StockLayers(30), "even"),
        ((15, 15), StockLayers(30), (15, 15)),
        (None, StockLayers(30, first=10), None),
    ],
    ids=["no flag", "even", "a list", "a flag of Megatron's"],
)
def test_layers_are_chosen_where_no_flag_says_where_they_are(flag: Any, stock: StockLayers, chosen: Any):
    settings = Settings(ScheduleChoice("auto", "auto"), layers=flag)
    first = next(choices(JobSpec(settings, Sizes(2, 2), layers=stock, model=MODEL)))
    assert first.settings.layers == chosen
