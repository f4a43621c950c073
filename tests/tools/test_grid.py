"""The grid search: nothing better is left out, and what does not fit is not offered."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.schedules.estimate.device_memory import RESERVED
from megatron.schedules.estimate.devices import DEVICES, GIB
from megatron.schedules.estimate.models import gpt
from tools._grid import Question, fastest, search
from tools._iteration import estimate
from tools._methods import METHODS, Method

SMALL = gpt("small", layers=6, heads=16, hidden=4096, sequence=2048)
# So little memory that not every setting fits.
DEVICE = replace(DEVICES["A100-80GB"], memory=5 * GIB / (1 - RESERVED))
QUESTION = Question(SMALL, DEVICE, 8, 16)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_the_best_is_what_trying_everything_gives(method: Method):
    tried = [estimate(setting) for setting in QUESTION.settings(method)]
    fitting = sorted((each for each in tried if each.fits), key=lambda each: -each.mfu)
    assert len(fitting) < len(tried)
    found = search(QUESTION, method, top=2)
    assert [each.mfu for each in found.best] == [each.mfu for each in fitting[:2]]


def test_settings_use_all_gpus_once_and_divide_the_batch():
    seen = list(QUESTION.settings(METHODS[0]))
    assert len(seen) == len({(s.data, s.tensor, s.pipeline, s.micro_batch) for s in seen}) > 10
    assert all(s.gpus == 8 and s.microbatches * s.micro_batch * s.data == 16 and not s.wrong for s in seen)


def test_where_nothing_fits_it_says_what_the_least_would_take():
    least = min(estimate(setting).memory for setting in QUESTION.settings(METHODS[0]))
    found = search(replace(QUESTION, device=replace(DEVICE, memory=(least - GIB / 8) / (1 - RESERVED))), METHODS[0])
    assert found.best == [] and found.short is not None
    assert (found.short.memory, found.short.planned) == (least, True)
    nothing = search(replace(QUESTION, device=replace(DEVICE, memory=0.0)), METHODS[0])
    assert (nothing.best, nothing.tried) == ([], 0)
    assert nothing.short is not None and not nothing.short.planned
    # One microbatch is less than a plan holds, and with more GPUs it is the messages that stay.
    assert nothing.short.memory < least
    assert nothing.short.gpus is None


def test_the_fastest_of_all_methods_comes_first():
    found = [search(QUESTION, method, top=2) for method in METHODS[:3]]
    shares = [each.mfu for each in fastest(found)]
    assert shares == sorted(shares, reverse=True)
    assert len(shares) == 6
