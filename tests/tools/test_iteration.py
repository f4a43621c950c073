"""Estimates of an iteration: sizes that are known, bounds that hold, and terms that add up."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from megatron.schedules.estimate.device_memory import RESERVED
from megatron.schedules.estimate.devices import DEVICES, GIB
from megatron.schedules.estimate.model_build import StockRecompute
from megatron.schedules.estimate.models import MODELS, Model, built, gpt
from megatron.schedules.estimate.roofline import Roofline, corrections
from megatron.schedules.estimate.times import ONES, PassTimes, layer_times, loads
from megatron.schedules.job.plan_job import plan_job
from megatron.schedules.measure.job_profile import JobProfile, Measured, StageProfile
from megatron.schedules.measure.profile_facts import Facts
from megatron.schedules.schedule.placement import Placement
from tools._bounds import Promise, Stages
from tools._iteration import (
    Estimate,
    after_the_pipeline,
    estimate,
    memory_limit,
    mfu,
    planned,
    quick_estimate,
)
from tools._methods import ADAPTIVE, INTERLEAVED, METHODS, ONE_F_ONE_B, SAVING, Method
from tools._pasted import flags, overrides
from tools._question import FULL, recomputes
from tools._setting import NONE, Setting
from tools._start import Given

A100 = DEVICES["A100-80GB"]
SMALL, LAYERS = gpt("small", layers=14, heads=16, hidden=2048), 14
NAMED = {method.name: method for method in (*METHODS, ADAPTIVE)} | {
    "interleaved": INTERLEAVED._replace(chunks=2),
    "1F1B-R": ONE_F_ONE_B._replace(name="1F1B-R"),
}


# arXiv 2405.15362 counts 12 h^2 + 13 h in a layer and one table; positions and the last norm come to it.
TABLE = 32_000 * 2048
WHOLE = LAYERS * (12 * 2048**2 + 13 * 2048) + TABLE + 1024 * 2048 + 2 * 2048


def setting(method: str = "1F1B", model: Model = SMALL, **others: int) -> Setting:
    sizes = {"data": 1, "tensor": 1, "pipeline": 4, "micro_batch": 1, "global_batch": 12} | others
    return Setting(NAMED[method], model, A100, **sizes, recompute=FULL if method == "1F1B-R" else NONE)


def promise(at: Setting) -> Promise:
    """Bounds of a setting."""
    one = replace(at, pipeline=1, data=at.data * at.pipeline, recompute=NONE)
    (found,) = (
        each for each in Stages(one).promises([at.recompute], [at.pipeline], 1) if each.chunks == at.method.chunks
    )
    assert found.setting == at
    return found


def layer(model: Model = SMALL, tensor: int = 1, samples: int = 1) -> PassTimes:
    """Seconds of one layer."""
    build = built(model.trained(tensor_model_parallel_size=tensor, sequence_parallel=tensor > 1))
    return layer_times(build, Roofline(A100), samples * model.sequence)


def ends() -> tuple[PassTimes, PassTimes]:
    """Seconds of the embedding and of the output layer."""
    found = loads(SMALL.whole, Roofline(A100), SMALL.sequence)
    first, last = (PassTimes(*part.whole[:3]) for part in (found.first, found.last))
    return first, last


def static_bytes(at: Setting) -> list[float]:
    """What each pipeline rank holds all the time."""
    return [rank.static for rank in estimate(at, search_seconds=0.05).ranks]


def free(at: Setting, room: float) -> Setting:
    """On a device with so many GiB for activations and messages."""
    return replace(at, device=replace(A100, memory=(max(static_bytes(at)) + room * GIB) / (1 - RESERVED)))


@pytest.mark.parametrize("name", [name for name in MODELS if name[0].isdigit()])
def test_the_papers_models_have_the_parameters_in_their_names(name: str):
    assert f"{MODELS[name].parameters / 1e9:.1f}".removesuffix(".0") + "B" == name


def test_work_is_some_six_times_parameters_a_token_and_attention():
    model = MODELS["21B"]
    attention = 6 * 46 * model.sequence * 6144
    assert model.flops_a_token == pytest.approx(6 * model.parameters + attention, rel=0.01)


@pytest.mark.parametrize("again", recomputes(SMALL, None)[1:], ids=str)
@pytest.mark.parametrize("method", ["1F1B", "ZB-1P", "V-Min", "V-Half", "V-ZB"])
def test_nothing_needs_less_time_or_memory_than_its_bound_with_recompute(method: str, again: StockRecompute):
    found = estimate(replace(setting(method), recompute=again))
    (bound,) = promise(found.setting).bounds
    assert bound.seconds <= found.seconds + 1e-9
    assert bound.bytes <= found.memory


def test_a_rank_with_more_layers_than_others_bounds_the_time():
    (bound,) = promise(setting("ZB-1P", pipeline=8, global_batch=200)).bounds
    # 14 layers on 8 ranks are two of some rank, however small the ends are.
    assert bound.seconds >= 200 * 2 * layer().whole > 200 * (LAYERS * layer().whole + sum(x.whole for x in ends())) / 8


@pytest.mark.parametrize("method", NAMED)
def test_nothing_is_faster_than_the_bound_and_all_work_is_in_the_time(method: str):
    found = estimate(setting(method), search_seconds=0.05)
    assert promise(found.setting).bounds[0].seconds <= found.seconds + 1e-9
    assert promise(found.setting).bounds[0].bytes <= found.memory
    assert found.mfu == mfu(found.setting, found.seconds)
    assert 0 < found.mfu < 1
    busy = (1 - found.bubble) * (found.seconds - after_the_pipeline(found.setting)) * 4
    layers = LAYERS * (layer().whole + times_again(method) * layer().forward)
    assert busy == pytest.approx(12 * (layers + sum(end.whole for end in ends())), rel=0.02)


def test_memory_of_the_methods_is_as_the_paper_orders_it():
    held = {name: estimate(setting(name, pipeline=8)).activations for name in NAMED if name != "adaptive"}
    assert held["1F1B-R"] < held["V-Min"] < held["V-Half"] < held["1F1B"]
    assert held["V-ZB"] < 1.2 * held["1F1B"]


def test_static_memory_is_eighteen_bytes_a_parameter_less_what_data_parallel_ranks_share():
    whole = WHOLE + TABLE
    for data, each in ((1, 18.0), (4, 9.0)):
        held = static_bytes(setting(data=data))
        assert sum(held) == pytest.approx(each * whole)
    # The V has both ends on its first rank.
    of_layer = 18 * (12 * 2048**2 + 13 * 2048)
    ends = []
    for name in ("V-Half", "1F1B"):
        at = setting(name)
        counts = [sum(at.layers[stage] for stage in at.placement.stages_of(rank)) for rank in range(4)]
        ends.append([held - count * of_layer for held, count in zip(static_bytes(at), counts, strict=True)])
    positions, last_norm = 18 * 1024 * 2048, 18 * 2 * 2048
    v, line = ends
    assert line[0] - positions == line[-1] - last_norm == 18 * TABLE
    assert v[0] == line[0] + line[-1] and v[1:] == [0, 0, 0]


def test_a_tensor_parallel_layer_takes_less_than_all_and_more_than_its_share():
    alone = layer(MODELS["98.5B"])
    for tensor in (2, 4, 8):
        shared = layer(MODELS["98.5B"], tensor)
        assert alone.whole / tensor < shared.whole < alone.whole


def test_a_larger_microbatch_takes_no_longer_a_sample():
    times = [layer(samples=size).whole / size for size in (1, 2, 4, 8)]
    assert all(after <= before for before, after in itertools.pairwise(times))


def test_a_correction_scales_each_pass_by_itself():
    plain, at = layer(), setting()
    corrected = replace(at, correction=PassTimes(2.0, 3.0, 4.0))
    for of, factors in ((at, ONES), (corrected, corrected.correction)):
        assert of.costs.model.mean[:3] == pytest.approx(plain.scaled(factors))


def test_a_profile_of_what_the_roofline_says_corrects_nothing_and_one_of_twice_that_by_two():
    facts = Facts("a GPU", LAYERS, 2048, 16, SMALL.sequence, 1, 1)
    for times in (1, 2):
        ms = [1e3 * times * LAYERS * time for time in layer()]
        stage = StageProfile(LAYERS, {kind: Measured(each, each, each) for kind, each in zip("FIW", ms, strict=True)})
        measured = JobProfile(facts, "no pipeline", Placement("one", (0,)), 1, (1, 1), 1, (stage,))
        for model in (SMALL, MODELS["9.6B"]):  # of its own layers, and of a plain GPT's
            assert corrections(measured, A100, model) == pytest.approx((times,) * 3)


def test_costs_are_those_of_layers_and_ends_however_many_stages_share_them():
    for method in ("1F1B", "V-Half"):
        at = setting(method)
        on_stages = at.costs.on(at.placement)
        total = LAYERS * layer().whole + sum(end.whole for end in ends())
        stages = zip(*(on_stages.durations[kind] for kind in "FB"), strict=True)
        assert sum(map(sum, stages)) == pytest.approx(total)
        # Layers are those of four ranks, and the ends hold something beside.
        beside = (at.memory.first.kept + at.memory.last.kept) / at.memory.of_rank(4)
        assert sum(on_stages.activation) == pytest.approx(4 + beside)


@pytest.mark.parametrize("name", ["1F1B", "1F1B-R", "V-Half", "adaptive"])
def test_a_shared_vocabulary_is_on_all_ranks_alike(name: str):
    plain = setting(name)
    shared = replace(plain, model=gpt("small", 16, 16, 2048), method=plain.method.sharing())
    static = static_bytes(shared)
    # Positions and the last norm are at their ends alone.
    assert max(static) == pytest.approx(min(static), abs=18 * (1024 * 2048 + 2 * 2048))
    assert sum(static) == pytest.approx(18.0 * (WHOLE + TABLE + 2 * (12 * 2048**2 + 13 * 2048)))
    found = estimate(shared, search_seconds=0.05)
    assert promise(shared).bounds[0].seconds <= found.seconds + 1e-9
    busy = (1 - found.bubble) * (found.seconds - after_the_pipeline(shared)) * 4
    layers = 16 * (layer().whole + times_again(name) * layer().forward)
    assert busy == pytest.approx(12 * (layers + sum(end.whole for end in ends())), rel=0.02)
    assert "--pipeline-vocabulary-parallel" in flags(found)


def times_again(name: str) -> int:
    """How often a layer's forward is recomputed."""
    return 1 if name == "1F1B-R" else 0


def test_with_a_shared_vocabulary_layers_need_not_spread_evenly():
    shared = replace(setting("V-Half"), model=gpt("small", 13, 16, 2048), method=NAMED["V-Half"].sharing())
    assert shared.wrong == ""
    assert estimate(shared).mfu > 0


def test_an_adaptive_plan_takes_what_room_there_is():
    tight = free(setting("adaptive"), 1)
    assert 0 < memory_limit(tight) < memory_limit(setting("adaptive")) == 2.0
    assert estimate(tight, search_seconds=0.05).fits
    asked = replace(setting("adaptive"), method=Method("half", "adaptive", 2, memory_limit=0.5))
    assert memory_limit(asked) == 0.5


def saved(method: Method, room: float = 1.3) -> Setting:
    """With so many GiB left to activations on a device with little memory and a fast link to its host."""
    at = replace(setting("adaptive", pipeline=2, global_batch=6, micro_batch=2, data=1), method=method)
    return replace(at, device=replace(free(at, room).device, host_link=100e9))


@pytest.mark.parametrize("method", SAVING, ids=lambda method: method.name)
def test_recompute_and_offload_make_more_of_little_memory(method: Method):
    at = saved(method)
    found, without = estimate(at, search_seconds=0.02), estimate(saved(ADAPTIVE), search_seconds=0.02)
    assert found.fits
    assert found.mfu > 1.02 * without.mfu
    assert promise(at).bounds[0].seconds <= found.seconds + 1e-9
    assert (found.host > 0) == method.may_offload
    assert method.may_recompute or found.outcome.recomputed == 0
    # What is recomputed takes time, and is no part of the model's arithmetic.
    assert found.mfu == mfu(at, found.seconds)
    useful = (1 - found.bubble) * (1 - found.outcome.recomputed) * (found.seconds - after_the_pipeline(at)) * 2
    layers = LAYERS * layer(samples=2).whole
    found_ends = loads(SMALL.whole, Roofline(A100), 2 * SMALL.sequence)
    slots = layers + sum(sum(part.whole[:3]) for part in (found_ends.first, found_ends.last))
    assert useful == pytest.approx(3 * slots, rel=0.02)


def test_copies_take_what_their_bytes_take_on_the_link():
    at = saved(SAVING[1])
    held = LAYERS * (34 * 2048 + 4 * 16) * 2 * SMALL.sequence / 2  # of a rank; arXiv 2205.05198, and rows of scores
    assert at.costs.copies.time == pytest.approx(held / 2 / 100e9)
    slow = replace(at, device=replace(at.device, host_link=50e9))
    assert slow.costs.copies.time == pytest.approx(2 * at.costs.copies.time)
    assert "--pipeline-save-memory offload=50 " in flags(estimate(slow, search_seconds=0.02))
    assert "--pipeline-save-memory both=100 " in flags(estimate(saved(SAVING[2]), search_seconds=0.02))


def test_what_the_host_has_no_room_for_does_not_fit():
    found = estimate(saved(SAVING[1]), search_seconds=0.02)
    device = replace(found.setting.device, host_memory=found.host / 2)
    assert found.fits and not replace(found, setting=replace(found.setting, device=device)).fits


@pytest.mark.parametrize(
    ("wrong", "others"),
    [
        ("divide into microbatches", {"micro_batch": 5}),
        ("too few for the stages", {"pipeline": 17}),
        ("tensor parallel size", {"tensor": 3}),
        ("twice the context parallel size", {"context": 3}),
        ("expert parallel size", {"expert": 2}),
        ("", {}),
    ],
)
def test_settings_that_cannot_be(wrong: str, others: dict[str, int]):
    why = setting(**others).wrong
    assert wrong in why
    assert bool(wrong) == bool(why)


@pytest.mark.parametrize("name", [name for name in NAMED if name != "adaptive"])
def test_few_microbatches_say_what_many_take(name: str):
    at = setting(name, global_batch=44)
    few, many = quick_estimate(at), estimate(at)
    # The end of a short V-Min reaches into its steady state.
    rounding = 0.02 if name == "V-Min" else 2e-3
    assert few.seconds == pytest.approx(many.seconds, rel=rounding)
    assert few.bubble == pytest.approx(many.bubble, abs=rounding)
    assert few.memory == pytest.approx(many.memory, rel=0.02)


@pytest.mark.parametrize("limit", [0.5, 0.7, 1.0, None])
def test_few_microbatches_say_about_what_many_take_in_a_searched_order(limit: float | None):
    at = setting("adaptive", global_batch=44)
    at = replace(at, method=at.method._replace(memory_limit=limit))
    assert quick_estimate(at, 0.3).seconds == pytest.approx(estimate(at, 0.3).seconds, rel=0.05)


# Where plans are polished in the fewest rounds, see polish._FEWEST_ROUNDS.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly) if name != "ZB-1P" else name for name in NAMED]
)
def test_further_microbatches_of_a_long_plan_all_take_the_same_time(name: str):
    at = setting(name, global_batch=20_500 // (4 * NAMED[name].chunks))
    few, whole = estimate(at, 0.3), planned(at, at.microbatches, 0.3, messages=0)
    rounding = 0.01 if name == "adaptive" else 1e-3
    assert few.outcome.seconds == pytest.approx(whole.seconds, rel=rounding)
    assert few.bubble == pytest.approx(whole.bubble, abs=rounding)
    activations = [rank.activations for rank in whole.ranks]
    assert [rank.activations for rank in few.ranks] == pytest.approx(activations, rel=rounding)


@pytest.mark.parametrize("name", ["1F1B", "interleaved", "ZB-1P", "V-Half"])
def test_an_estimate_counts_the_messages_that_the_job_holds(name: str):
    at = setting(name)
    assert estimate(at).ranks == plan_job(at.spec).memory


def test_stock_without_a_pipeline_computes_all_the_time():
    at = setting("1F1B", pipeline=1)
    found = estimate(at)
    assert found.bubble == 0
    total = 12 * (LAYERS * layer().whole + sum(end.whole for end in ends()))
    assert found.outcome.seconds == pytest.approx(total)
    assert "--pipeline" not in flags(found).replace("--pipeline-model-parallel-size 1", "")
    half = estimate(setting("1F1B", pipeline=2))
    assert found.activations == pytest.approx(half.activations, rel=0.1)


EXPERTS = Model(
    "experts",
    f"{SMALL.flags} --num-experts 8 --moe-ffn-hidden-size 2048 --swiglu --expert-model-parallel-size 4 "
    "--overlap-moe-expert-parallel-comm",
)


def test_stock_hides_messages_of_experts_only_where_megatron_does():
    def exposed(at: Setting) -> float:
        mean = planned(at, 8).seconds
        return mean / planned(replace(at, model=Model("", EXPERTS.flags.replace("--overlap-moe", "--no"))), 8).seconds

    sizes = {"data": 4, "expert": 4, "global_batch": 32}
    assert exposed(setting("interleaved", EXPERTS, **sizes)) < 1
    assert exposed(setting("1F1B", EXPERTS, **sizes)) == 1
    # Megatron refuses its overlap with full recompute.
    assert exposed(replace(setting("interleaved", EXPERTS, **sizes), recompute=FULL)) == 1


def test_messages_of_gradients_are_hidden_behind_one_microbatch_at_most():
    plain = setting(data=8, global_batch=96)
    hidden = replace(plain, model=Given(SMALL.name, SMALL.flags, SMALL.trained(overlap_grad_reduce=True)))
    slow = replace(hidden, device=replace(A100, link=1e9, network=1e9))
    assert after_the_pipeline(hidden) < after_the_pipeline(plain)
    exposed = after_the_pipeline(replace(plain, device=slow.device)) - after_the_pipeline(slow)
    assert exposed == pytest.approx(2 * sum(slow.costs.layers.passes[:3]))


def test_what_sets_a_setting_is_written_as_flags_and_as_python():
    stock, ours = (estimate(setting(name)) for name in ("interleaved", "V-Half"))
    assert '--pipeline-model-parallel-layout "E' in flags(stock)
    assert "--pipeline-schedule" not in flags(stock)
    assert "cfg.model.virtual_pipeline_model_parallel_size = 2\n" in overrides(stock)
    assert "cfg.model.pipeline_model_parallel_layout = 'E" in overrides(stock)
    placed = ",".join(map(str, ours.outcome.layers))
    assert f"--pipeline-schedule v-half --pipeline-layers {placed} " in flags(ours)
    assert f'megatron.schedules.install(schedule="v-half", layers="{placed}")' in overrides(ours)
    assert isinstance(ours, Estimate)
