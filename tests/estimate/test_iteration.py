"""Estimates of an iteration: sizes that are known, bounds that hold, and terms that add up."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from megatron.schedules.estimate.hardware import DEVICES, GIB, MODELS, Model
from megatron.schedules.estimate.iteration import (
    ADAPTIVE,
    METHODS,
    RELIEVED,
    RESERVED,
    Method,
    Setting,
    after_the_pipeline,
    costs,
    estimate,
    least_seconds,
    memory_limit,
    mfu,
    static_bytes,
)
from megatron.schedules.estimate.roofline import ONES, Microbatch, PassTimes, corrections, slot_times
from megatron.schedules.measure.cost_profile import CostProfile
from megatron.schedules.measure.profile_facts import Facts

A100 = DEVICES["A100-80GB"]
SMALL = Model("small", layers=14, heads=16, hidden=2048)
NAMED = {method.name: method for method in (*METHODS, ADAPTIVE)}


def setting(method: str = "1F1B", model: Model = SMALL, **others: int) -> Setting:
    sizes = {"data": 1, "tensor": 1, "pipeline": 4, "micro_batch": 1, "global_batch": 12} | others
    return Setting(NAMED[method], model, A100, **sizes)


@pytest.mark.parametrize("name", MODELS)
def test_the_papers_models_have_the_parameters_in_their_names(name: str):
    assert f"{MODELS[name].parameters / 1e9:.1f}".removesuffix(".0") + "B" == name


def test_work_is_some_six_times_parameters_a_token_and_attention():
    model = MODELS["21B"]
    attention = 6 * model.layers * model.sequence * model.hidden
    assert model.flops_a_token == pytest.approx(6 * model.parameters + attention, rel=0.01)


@pytest.mark.parametrize("method", NAMED)
def test_nothing_is_faster_than_the_bound_and_all_work_is_in_the_time(method: str):
    found = estimate(setting(method), search_seconds=0.05)
    assert least_seconds(found.setting) <= found.seconds + 1e-9
    assert found.mfu == mfu(found.setting, found.seconds)
    assert 0 < found.mfu < 1
    busy = (1 - found.bubble) * (found.seconds - after_the_pipeline(found.setting)) * 4
    times = slot_times(Microbatch(SMALL), A100)
    slots = times.embedding.whole + SMALL.layers * times.layer.whole + times.output_layer.whole
    again = times.embedding.forward + SMALL.layers * times.layer.forward + times.output_layer.forward
    assert busy == pytest.approx(12 * (slots + again * (method == "1F1B-R")), rel=0.02)


def test_memory_of_the_methods_is_as_the_paper_orders_it():
    held = {method.name: estimate(setting(method.name, pipeline=8)).activations for method in METHODS}
    assert held["1F1B-R"] < held["V-Min"] < held["V-Half"] < held["1F1B"]
    assert held["V-ZB"] < 1.2 * held["1F1B"]


def test_static_memory_is_eighteen_bytes_a_parameter_less_what_data_parallel_ranks_share():
    ends = 2 * SMALL.vocabulary * SMALL.hidden
    whole = SMALL.layers * SMALL.layer_parameters + ends
    for data, each in ((1, 18.0), (4, 9.0)):
        held = static_bytes(setting(data=data))
        assert sum(held) - 4 * RESERVED == pytest.approx(each * whole)
    # The V has both ends on its first rank.
    v, line = static_bytes(setting("V-Half")), static_bytes(setting("1F1B"))
    assert v[0] == max(v)
    assert line[0] == line[-1] > line[1] - 18 * SMALL.layer_parameters


def test_a_tensor_parallel_layer_takes_less_than_all_and_more_than_its_share():
    alone = slot_times(Microbatch(MODELS["98.5B"]), A100).layer
    for tensor in (2, 4, 8):
        shared = slot_times(Microbatch(MODELS["98.5B"], tensor), A100).layer
        assert alone.whole / tensor < shared.whole < alone.whole


def test_a_larger_microbatch_takes_no_longer_a_sample():
    times = [slot_times(Microbatch(SMALL, 1, size), A100).layer.whole / size for size in (1, 2, 4, 8)]
    assert all(after <= before for before, after in itertools.pairwise(times))


def test_a_correction_scales_each_pass_by_itself():
    plain = slot_times(Microbatch(SMALL), A100).layer
    measured = slot_times(Microbatch(SMALL), A100, PassTimes(2.0, 3.0, 4.0)).layer
    assert measured == PassTimes(2 * plain.forward, 3 * plain.input_grad, 4 * plain.weight_grad)
    assert plain.scaled(ONES) == plain


def test_a_profile_of_what_the_roofline_says_corrects_nothing_and_one_of_twice_that_by_two():
    times = slot_times(Microbatch(SMALL), A100).layer
    facts = Facts("a GPU", SMALL.layers, SMALL.hidden, SMALL.heads, SMALL.sequence, 1, 1)
    measured = CostProfile(facts, 2, times, 1.0, 1.0)
    assert corrections(measured, A100) == pytest.approx((0.5, 0.5, 0.5))  # of a chunk of two layers
    assert corrections(replace(measured, layers=1), A100) == pytest.approx((1, 1, 1))


def test_costs_are_those_of_slots_however_many_stages_share_them():
    for method in ("1F1B", "V-Half"):
        at = setting(method)
        on_stages = costs(at).on(at.placement)
        times = slot_times(at.microbatch, A100)
        total = times.embedding.whole + SMALL.layers * times.layer.whole + times.output_layer.whole
        stages = zip(*(on_stages.durations[kind] for kind in "FIW"), strict=True)
        assert sum(map(sum, stages)) == pytest.approx(total)
        # Costs divide the passes of all slots alike: a stage has its time in full, if not each of its passes.
        assert sum(on_stages.activation) == pytest.approx(4)


@pytest.mark.parametrize("name", ["1F1B", "1F1B-R", "V-Half", "adaptive"])
def test_a_shared_vocabulary_is_on_all_ranks_alike(name: str):
    plain = setting(name)
    shared = replace(plain, model=replace(SMALL, layers=16), method=plain.method.sharing())
    static = static_bytes(shared)
    assert max(static) == pytest.approx(min(static))
    whole = 16 * SMALL.layer_parameters + 2 * SMALL.vocabulary * SMALL.hidden
    assert sum(static) - 4 * RESERVED == pytest.approx(18.0 * whole)
    found = estimate(shared, search_seconds=0.05)
    assert least_seconds(shared) <= found.seconds + 1e-9
    times, again = slot_times(Microbatch(SMALL), A100), times_again(name)
    busy = (1 - found.bubble) * (found.seconds - after_the_pipeline(shared)) * 4
    layers = 16 * (times.layer.whole + again * times.layer.forward)
    assert busy == pytest.approx(12 * (layers + times.embedding.whole + times.output_layer.whole), rel=0.02)
    assert "--pipeline-vocabulary-parallel" in shared.flags


def times_again(name: str) -> int:
    """How often a layer's forward is done again."""
    return 1 if name == "1F1B-R" else 0


def test_with_a_shared_vocabulary_layers_need_not_spread_evenly():
    shared = replace(setting("V-Half"), model=replace(SMALL, layers=13), method=NAMED["V-Half"].sharing())
    assert shared.wrong == ""
    assert estimate(shared).mfu > 0


def test_an_adaptive_plan_takes_what_room_there_is():
    tight = replace(setting("adaptive"), device=replace(A100, memory=max(static_bytes(setting("adaptive"))) + 1 * GIB))
    assert 0 < memory_limit(tight) < memory_limit(setting("adaptive")) == 2.0
    assert estimate(tight, search_seconds=0.05).fits
    asked = replace(setting("adaptive"), method=Method("half", "adaptive", 2, memory_limit=0.5))
    assert memory_limit(asked) == 0.5


def relieved(method: Method, room: float = 1.3) -> Setting:
    """With so many GiB left to activations on a device with little memory and a fast link to its host."""
    at = replace(setting("adaptive", pipeline=2, global_batch=6, micro_batch=2, data=1), method=method)
    return replace(at, device=replace(A100, memory=max(static_bytes(at)) + room * GIB, host_link=100e9))


@pytest.mark.parametrize("method", RELIEVED, ids=lambda method: method.name)
def test_recompute_and_offload_make_more_of_little_memory(method: Method):
    at = relieved(method)
    found, without = estimate(at, search_seconds=0.02), estimate(relieved(ADAPTIVE), search_seconds=0.02)
    assert found.fits
    assert found.mfu > 1.02 * without.mfu
    assert least_seconds(at) <= found.seconds + 1e-9
    assert (found.host > 0) == method.offload
    assert method.again or found.recomputed == 0
    # What is done again takes time, and is no part of the model's arithmetic.
    assert found.mfu == mfu(at, found.seconds)
    useful = (1 - found.bubble) * (1 - found.recomputed) * (found.seconds - after_the_pipeline(at)) * 2
    times = slot_times(at.microbatch, at.device)
    slots = times.embedding.whole + SMALL.layers * times.layer.whole + times.output_layer.whole
    assert useful == pytest.approx(3 * slots, rel=0.02)


def test_copies_take_what_their_bytes_take_on_the_link():
    at = relieved(RELIEVED[1])
    held = SMALL.layers * SMALL.layer.whole.held * at.microbatch.tokens / 2  # of a rank
    assert costs(at).copy == pytest.approx(held / 2 / 100e9)
    slow = replace(at, device=replace(at.device, host_link=50e9))
    assert costs(slow).copy == pytest.approx(2 * costs(at).copy)
    assert "--pipeline-save-memory offload=50 " in slow.flags
    assert "both=" not in slow.flags and "--pipeline-save-memory both=" in relieved(RELIEVED[2]).flags


def test_what_the_host_has_no_room_for_does_not_fit():
    found = estimate(relieved(RELIEVED[1]), search_seconds=0.02)
    device = replace(found.setting.device, host_memory=found.host / 2)
    assert found.fits and not replace(found, setting=replace(found.setting, device=device)).fits


@pytest.mark.parametrize(
    ("wrong", "others"),
    [
        ("divide into microbatches", {"micro_batch": 5}),
        ("spread over the stages", {"pipeline": 3}),
        ("tensor parallel size", {"tensor": 3}),
        ("", {}),
    ],
)
def test_settings_that_cannot_be(wrong: str, others: dict[str, int]):
    why = setting(**others).wrong
    assert wrong in why
    assert bool(wrong) == bool(why)
