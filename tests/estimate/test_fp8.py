"""FP8 and FP4 in estimates: bytes of what a linear keeps, the rate of its products, and attention as in bf16."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.schedules.estimate.activations import activations, whole
from megatron.schedules.estimate.build import Build, LayerKind
from megatron.schedules.estimate.build_flags import numbers
from megatron.schedules.estimate.devices import DEVICES
from megatron.schedules.estimate.models import find_model
from megatron.schedules.estimate.parameters import parameters
from megatron.schedules.estimate.roofline import Roofline
from megatron.schedules.estimate.symbols import works
from megatron.schedules.estimate.times import Prices, layer_times, loads
from megatron.schedules.utils.errors import PlanError
from tools._question import Question

LLAMA = "Llama-3-8B"
HIDDEN, INNER, KEYS, QUERIES = 4096, 14336, 1024, 4096
RECIPES = {"tensorwise": 1.0, "delayed": 1.0, "blockwise": 1 + 1 / 32, "mxfp8": 1 + 1 / 32, "nvfp4": 1 / 2 + 1 / 16}


def flags(recipe: str) -> str:
    if recipe == "nvfp4":
        return "--fp4-format e2m1"
    return f"--fp8-format hybrid --fp8-recipe {recipe}" if recipe else ""


def of(recipe: str, more: str = "") -> Build:
    return find_model(" ".join(filter(None, (LLAMA, flags(recipe), more)))).whole


@pytest.mark.parametrize("recipe", RECIPES)
def test_operands_take_as_many_bytes_as_their_format(recipe: str) -> None:
    """For W, of inputs and outputs' gradients. From F to I norms, attention and activations keep bf16 too."""
    plain, quantized = (activations(of(each)).layers[1] for each in ("", recipe))
    each = RECIPES[recipe]
    assert whole(quantized).weights == pytest.approx(each / 2 * whole(plain).weights)
    spared = (2 - each) * (2 * HIDDEN + INNER)
    # The scale of a tensor may have changed when W comes: the projection cannot quantize what attention keeps.
    again = each * QUERIES if recipe == "delayed" else 0
    assert whole(plain).forward - whole(quantized).forward == pytest.approx(spared - again)


def test_layers_at_the_ends_stay_in_bf16() -> None:
    ends = "--first-last-layers-bf16 --num-layers-at-start-in-bf16 2"
    found = of("tensorwise", ends)
    assert [kind.quantized for kind in found.kinds] == [False] * 2 + [True] * 29 + [False]
    times = [layer.split.weight_grad for layer in loads(found).layers]
    assert times[0] == times[1] == times[-1] == 2 * times[2]
    assert of("", ends).kinds == of("").kinds
    assert of("tensorwise", "--transformer-impl local").quantized is None


@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_have_a_copy_by_rows_and_one_by_columns(recipe: str) -> None:
    counts = parameters(of(recipe)).layers[1]
    linears = HIDDEN * (QUERIES + 2 * KEYS) + QUERIES * HIDDEN + 3 * HIDDEN * INNER
    assert counts.quantized == linears == counts.all - 2 * HIDDEN  # but for two norms
    copies = numbers(find_model(f"{LLAMA} {flags(recipe)}").args).weights(counts) - 2 * counts.all
    assert copies == pytest.approx(2 * linears * (1 if recipe == "blockwise" else RECIPES[recipe]), rel=1e-3)


@pytest.mark.parametrize("recipe", RECIPES)
def test_primary_weights_have_only_these_copies(recipe: str) -> None:
    """Norms, embedding and output layer stay in half precision, and so do layers at the ends."""
    gather = f"--{'fp4' if recipe == 'nvfp4' else 'fp8'}-param-gather"
    both, alone = (find_model(f"{LLAMA} {flags(recipe)} {more}") for more in ("", gather))
    before, now = (parameters(model.whole).layers[1] for model in (both, alone))
    assert (before.primary, now.primary) == (0, before.quantized)
    spared = numbers(both.args).weights(before) - numbers(alone.args).weights(now)
    assert spared == 2 * before.quantized
    ends = find_model(f"{LLAMA} {flags(recipe)} {gather} --first-last-layers-bf16")
    assert parameters(ends.whole).layers[0].primary == parameters(alone.whole).table.primary == 0


@pytest.mark.parametrize(("recipe", "speed"), [("tensorwise", 2), ("nvfp4", 4)])
def test_products_are_faster_and_attention_takes_as_long_as_in_bf16(recipe: str, speed: int) -> None:
    build = of(recipe)
    free = type("Free", (Prices,), {"stream": lambda self, size, kernels=1: 0.0})()
    plain, quantized = (layer_times(build, free, 1.0, LayerKind(quantized=each)) for each in (False, True))
    scores, _ = works(build, "*")[0].scores
    assert quantized.forward - scores == pytest.approx((plain.forward - scores) / speed)
    assert quantized.input_grad - 2.5 * scores == pytest.approx((plain.input_grad - 2.5 * scores) / speed)
    assert quantized.weight_grad == plain.weight_grad / speed


def test_on_a_gpu_layers_are_faster_by_less_than_products() -> None:
    """Operands must be quantized. A tensor's own scale takes another read."""
    h100 = Roofline(DEVICES["H100-80GB"])
    plain, tensorwise, delayed = (
        layer_times(of(recipe), h100, 8192.0, LayerKind(quantized=bool(recipe)))
        for recipe in ("", "tensorwise", "delayed")
    )
    assert 0.5 * plain.whole < delayed.whole < tensorwise.whole < 0.8 * plain.whole


@pytest.mark.parametrize(
    ("recipe", "device", "said"),
    [
        ("tensorwise", "A100-80GB", "tensorwise does not run on A100-80GB, which has no FP8: leave out --fp8-format"),
        ("nvfp4", "H100-80GB", "nvfp4 does not run on H100-80GB"),
        ("mxfp8", "H100-80GB", "which has tensorwise, delayed, blockwise: give one of them as"),
    ],
)
def test_a_device_without_the_recipe_is_refused(recipe: str, device: str, said: str) -> None:
    model = find_model(f"{LLAMA} {flags(recipe)}")
    with pytest.raises(PlanError, match=said):
        Question(model, DEVICES[device], 8, 16)
    question = Question(find_model(LLAMA), DEVICES[device], 8, 16)
    assert replace(question, gpus=16).gpus == 16
