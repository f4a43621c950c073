"""The grid search: nothing better is left out, and what does not fit is not offered."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.schedules.estimate.device_memory import RESERVED
from megatron.schedules.estimate.devices import DEVICES, GIB
from megatron.schedules.estimate.models import Model, gpt
from tools import _grid
from tools._grid import Search, bounds_of, fastest, near, quick, search, whole
from tools._iteration import Estimate, estimate, quick_estimate
from tools._methods import ADAPTIVE, INTERLEAVED, METHODS, ONE_F_ONE_B, SAVING, Method
from tools._question import FULL, Question, recomputes
from tools._setting import NONE

SMALL = gpt("small", layers=6, heads=16, hidden=4096, sequence=2048)
# So little memory that not every setting fits.
DEVICE = replace(DEVICES["A100-80GB"], memory=5 * GIB / (1 - RESERVED))
QUESTION = Question(SMALL, DEVICE, 8, 16, recomputes=(NONE,))


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
    assert any(s.pipeline == 1 for s in seen)
    assert all(s.gpus == 8 and s.microbatches * s.micro_batch * s.data == 16 and not s.wrong for s in seen)


def test_where_nothing_fits_it_says_what_the_least_would_take():
    least = min(estimate(setting).memory for setting in QUESTION.settings(METHODS[0]))
    found = search(replace(QUESTION, device=replace(DEVICE, memory=(least - GIB / 8) / (1 - RESERVED))), METHODS[0])
    assert found.best == [] and found.short is not None
    assert found.short.memory == least
    nothing = search(replace(QUESTION, device=replace(DEVICE, memory=0.0)), METHODS[0])
    assert (nothing.best, nothing.tried) == ([], 0)
    assert nothing.short is not None and not nothing.short.planned
    # Without a pipeline what one microbatch needs is known.
    assert nothing.short.memory == least
    assert nothing.short.gpus is None


def test_the_fastest_of_all_methods_comes_first():
    found = [search(QUESTION, method, top=2) for method in METHODS[:3]]
    shares = [each.mfu for each in fastest(found)]
    assert shares == sorted(shares, reverse=True)
    assert len(shares) == 6


def test_recompute_is_what_memory_asks_for():
    searched = replace(QUESTION, recomputes=None)
    assert [each.granularity for each in searched.tried_recomputes] == [None, "selective", "selective", "full"]
    best = search(searched, ONE_F_ONE_B).best[0]
    kept = search(QUESTION, ONE_F_ONE_B).best[0]
    assert best.mfu >= kept.mfu
    least = min(estimate(setting).memory for setting in QUESTION.settings(ONE_F_ONE_B))
    short = replace(DEVICE, memory=0.99 * least / (1 - RESERVED))
    again = search(replace(searched, device=short), ONE_F_ONE_B).best[0]
    assert again.setting.recompute != NONE and again.mfu < best.mfu
    # What a script recomputes does not stay.
    own = replace(kept.setting, recompute=FULL)
    assert search(replace(searched, own=own), ONE_F_ONE_B).best[0].setting.recompute != FULL


def test_experts_and_interleaving_are_searched_where_megatron_allows_them():
    flags = f"{SMALL.flags} --num-experts 4 --moe-ffn-hidden-size 1024 --swiglu"
    question = replace(QUESTION, model=Model("experts", flags), device=DEVICES["H200"])
    seen = list(question.settings(INTERLEAVED))
    assert {each.expert for each in seen} == {1, 2, 4}
    assert {each.method.chunks for each in seen} > {2, 3}
    assert all(each.microbatches % each.pipeline == 0 for each in seen)
    assert all(each.gpus // each.pipeline % (each.expert * each.tensor) == 0 for each in seen)
    assert {each.modules for each in recomputes(question.model, None)} > {("layernorm", "moe_act"), ("moe",)}


def test_a_long_sequence_is_split_among_ranks_of_a_node():
    long = replace(QUESTION, model=SMALL.of_length(16384))
    assert {each.context for each in long.settings(ONE_F_ONE_B)} == {1, 2, 4}
    assert all(8 % (each.tensor * each.context) == 0 for each in long.settings(ONE_F_ONE_B))
    assert {each.context for each in QUESTION.settings(ONE_F_ONE_B)} == {1}


def test_what_plans_showed_about_idle_time_spares_others(monkeypatch: pytest.MonkeyPatch):
    v_min = METHODS[3]
    roomy = replace(QUESTION, device=DEVICES["A100-80GB"], gpus=32, global_batch=64)
    found = search(roomy, v_min)
    monkeypatch.setattr(_grid, "_EXPECTED", 0.0)
    by_bounds = search(roomy, v_min)
    assert found.best[0].seconds == by_bounds.best[0].seconds
    assert found.tried < by_bounds.tried


def test_nothing_is_planned_as_a_whole_that_a_running_estimate_may_spare():
    roomy = replace(QUESTION, device=DEVICES["A100-80GB"])
    state = Search(roomy, METHODS[2], bounds_of(roomy, METHODS[2]), 1)
    running = [job for _ in range(2) if (job := state.step()) is not None]
    assert [how for how, _ in running] == [quick, quick]
    state.tell(*running[0], quick(running[0][1]))
    while (job := state.step()) is not None:
        assert job[0] is quick
        running.append(job)
    for job in running[1:]:
        state.tell(*job, job[0](job[1]))
    job = state.step()
    assert job is not None and job[0] is whole


def test_a_searched_order_is_tried_with_the_fastest_sizes_of_short_pipelines():
    tasks = [(QUESTION, METHODS[5]), (QUESTION, ADAPTIVE)]
    state = Search(*tasks[0], bounds_of(*tasks[0]), 1)
    state.known = [
        Estimate(replace(setting, pipeline=ranks), 1.0 / ranks, 0.5, quick_estimate(setting).outcome)
        for setting in list(QUESTION.settings(METHODS[5]))[:1]
        for ranks in (4, 32, 64)
    ]
    found = near(tasks, {0: state}, 1)
    assert found is not None and [sizes.pipeline for sizes in found] == [32, 4]
    state.known = state.known[2:]
    found = near(tasks, {0: state}, 1)
    assert found is not None and [sizes.pipeline for sizes in found] == [64]
    assert near([tasks[0], (QUESTION, SAVING[0])], {0: state}, 1) is None


def test_a_search_that_is_cut_says_how_much_faster_others_might_be(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_grid, "_MOST", 2)
    roomy = replace(QUESTION, device=DEVICES["A100-80GB"])
    found = search(roomy, METHODS[2])
    first = bounds_of(roomy, METHODS[2]).fitting
    tried = [quick_estimate(each.setting).seconds for each in first[:2]]
    assert found.tried == 2
    assert found.gap == pytest.approx(max(0.0, 1 - first[2].bounds[0].seconds / min(tried)), abs=1e-6)
