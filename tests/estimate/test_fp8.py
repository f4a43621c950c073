"""FP8 in estimates: a byte a number for what a linear keeps, twice the rate of products, attention as in bf16."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.schedules.estimate.activations import activations, whole
from megatron.schedules.estimate.build import Build, Kind
from megatron.schedules.estimate.grid import Question
from megatron.schedules.estimate.model_build import numbers
from megatron.schedules.estimate.models import find_model
from megatron.schedules.estimate.parameters import parameters
from megatron.schedules.estimate.roofline import DEVICES, Roofline
from megatron.schedules.estimate.times import Prices, layer_times, loads
from megatron.schedules.estimate.work import layer_work
from megatron.schedules.utils.errors import PlanError

LLAMA = "Llama-3-8B"
HIDDEN, INNER, KEYS, QUERIES = 4096, 14336, 1024, 4096
RECIPES = {"tensorwise": 1.0, "delayed": 1.0, "blockwise": 1 + 1 / 32, "mxfp8": 1 + 1 / 32}


def of(recipe: str, more: str = "") -> Build:
    fp8 = f"--fp8-format hybrid --fp8-recipe {recipe}" if recipe else ""
    return find_model(" ".join(filter(None, (LLAMA, fp8, more)))).whole


@pytest.mark.parametrize("recipe", RECIPES)
def test_operands_take_a_byte_a_number_and_scales(recipe: str) -> None:
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
    assert [kind.fp8 for kind in found.kinds] == [False] * 2 + [True] * 29 + [False]
    times = [layer.split.weight_grad for layer in loads(found).layers]
    assert times[0] == times[1] == times[-1] == 2 * times[2]
    assert of("", ends).kinds == of("").kinds
    assert of("tensorwise", "--transformer-impl local").fp8 is None


@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_have_a_copy_by_rows_and_one_by_columns(recipe: str) -> None:
    counts = parameters(of(recipe)).layers[1]
    linears = HIDDEN * (QUERIES + 2 * KEYS) + QUERIES * HIDDEN + 3 * HIDDEN * INNER
    assert counts.quantized == linears == counts.all - 2 * HIDDEN  # but for two norms
    args = find_model(f"{LLAMA} --fp8-format e4m3 --fp8-recipe {recipe}").args
    copies = numbers(args).weights(counts) - 2 * counts.all
    assert copies == pytest.approx(2 * linears * (RECIPES[recipe] if recipe == "mxfp8" else 1), rel=1e-3)


def test_products_take_half_as_long_and_attention_as_long_as_in_bf16() -> None:
    build = of("tensorwise")
    free = type("Free", (Prices,), {"stream": lambda self, size, kernels=1: 0.0})()
    plain, quantized = (layer_times(build, free, 1.0, Kind(fp8=fp8)) for fp8 in (False, True))
    scores = layer_work(build).scores
    assert quantized.forward - scores == pytest.approx((plain.forward - scores) / 2)
    assert quantized.input_grad - 2.5 * scores == pytest.approx((plain.input_grad - 2.5 * scores) / 2)
    assert quantized.weight_grad == plain.weight_grad / 2


def test_on_a_gpu_layers_are_faster_by_less_than_products() -> None:
    """Operands must be quantized. A tensor's own scale takes another read."""
    h100 = Roofline(DEVICES["H100-80GB"])
    plain, tensorwise, delayed = (
        layer_times(of(recipe), h100, 8192.0, Kind(fp8=bool(recipe))) for recipe in ("", "tensorwise", "delayed")
    )
    assert 0.5 * plain.whole < delayed.whole < tensorwise.whole < 0.8 * plain.whole


@pytest.mark.parametrize(
    ("recipe", "device", "said"),
    [
        ("tensorwise", "A100-80GB", "--fp8-recipe tensorwise does not run on A100-80GB, which has no FP8: leave out"),
        ("mxfp8", "H100-80GB", "which has tensorwise, delayed, blockwise: use one of them"),
    ],
)
def test_a_device_without_the_recipe_is_refused(recipe: str, device: str, said: str) -> None:
    model = find_model(f"{LLAMA} --fp8-format hybrid --fp8-recipe {recipe}")
    with pytest.raises(PlanError, match=said):
        Question(model, DEVICES[device], 8, 16)
    question = Question(find_model(LLAMA), DEVICES[device], 8, 16)
    assert replace(question, gpus=16).gpus == 16
