"""FP8 and FP4 under a split backward, over Transformer Engine's own Python: gradients of its whole one, to the bit."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.server import VERSIONS, Megatron
from tests.support.te_python import CAPABILITY_VARIABLE
from tests.tiers import by_night, some_by_night

CAPABILITIES = {
    "tensorwise": "9.0",
    "tensorwise on Blackwell": "10.0",
    "delayed": "9.0",
    "blockwise": "9.0",
    "mxfp8": "10.0",
    "nvfp4": "10.0",
}
PRIMARY = ("tensorwise", "mxfp8")
PER_TENSOR = ("tensorwise", "tensorwise on Blackwell", "delayed")
# Versions of Transformer Engine that quantize parts of main weights.
OLDEST_THAT_SHARDS = dict.fromkeys(PER_TENSOR, (2, 3)) | {"blockwise": (2, 9), "nvfp4": (2, 16)}
TOKENS, WIDTH = 256, 128
BYTES = dict.fromkeys(CAPABILITIES, 1.0) | {"nvfp4": 1 / 2 + 1 / 16}
"""Of a number; four bits of NVFP4 share a scale of one byte by 16."""


@pytest.fixture
def fp8(te: Megatron, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a function of :mod:`.te_fp8` in ranks whose GPU, which is not there, knows a recipe."""

    def run(name: str, recipe: str, *args: Any, ranks: int = 1) -> Any:
        monkeypatch.setenv(CAPABILITY_VARIABLE, CAPABILITIES[recipe])
        return te("in_groups", ranks, called, name, recipe, *args, tensor_model_parallel_size=ranks)

    return run


def called(name: str, *args: Any) -> Any:
    """A function of :mod:`.te_fp8`, which needs Transformer Engine to be imported."""
    from tests.integration import te_fp8

    return getattr(te_fp8, name)(*args)


@pytest.mark.job
@pytest.mark.parametrize("recipe", CAPABILITIES)
def test_each_kind_of_linear(fp8: Any, recipe: str) -> None:
    assert fp8("every_kind", recipe) == [16]


@pytest.mark.parametrize(
    "recipe",
    some_by_night(CAPABILITIES, lambda name: name not in PRIMARY),
)
def test_each_kind_of_linear_with_primary_weights(fp8: Any, recipe: str) -> None:
    assert fp8("every_kind", recipe, True) == [16]


@pytest.mark.parametrize("recipe", OLDEST_THAT_SHARDS)
def test_parts_of_primary_weights_are_main_weights_quantized(fp8: Any, recipe: str) -> None:
    """Of MXFP8 Megatron gathers bf16 numbers, and quantizes whole weights."""
    fp8("main_weights_quantized", recipe, ranks=2)


@pytest.mark.job
@pytest.mark.parametrize("sequence_parallel", [by_night(False), True], ids=["whole", "sequence parallel"])
@pytest.mark.parametrize("recipe", CAPABILITIES)
def test_tensor_parallel_linears(fp8: Any, recipe: str, sequence_parallel: bool) -> None:
    fp8("tensor_parallel", recipe, sequence_parallel, ranks=2)


@pytest.mark.job
@pytest.mark.parametrize("primary", [False, True], ids=["", "primary weights"])
@pytest.mark.parametrize("recipe", CAPABILITIES)
def test_w_holds_quantized_numbers_and_scales(fp8: Any, recipe: str, primary: bool) -> None:
    """Of the input and of the output's gradient: in FP8 half of what bf16 takes. Of a primary weight nothing."""
    (held,) = fp8("held_for_w", recipe, primary)
    least = BYTES[recipe] * TOKENS * 2 * WIDTH
    assert least <= held <= 1.05 * least


@pytest.mark.parametrize("recipe", CAPABILITIES)
def test_under_sequence_parallelism_w_gathers_its_input(fp8: Any, recipe: str) -> None:
    """Held: half of the tokens' inputs, half of the columns of all tokens' gradients, and nothing that I gathered."""
    for held in fp8("held_under_sequence_parallelism", recipe, ranks=2):
        least = BYTES[recipe] * (TOKENS // 2 * WIDTH + TOKENS * WIDTH)
        assert least <= held <= 1.05 * least


@pytest.mark.parametrize("recipe", CAPABILITIES)
def test_what_is_offloaded_is_quantized(fp8: Any, recipe: str) -> None:
    """The linear's input, as W will read it, and its scales."""
    (sizes,) = fp8("offloaded", recipe)
    whole = BYTES[recipe] * TOKENS * WIDTH
    assert max(sizes) == TOKENS * WIDTH // (2 if recipe == "nvfp4" else 1) and sum(sizes) <= 1.05 * whole


CHECKS = (
    ("main_weights_quantized", 2, ()),
    ("every_kind", 1, (True,)),
    ("every_kind", 1, ()),
    ("tensor_parallel", 2, (True,)),
    ("held_for_w", 1, ()),
    ("held_under_sequence_parallelism", 2, ()),
)


@pytest.mark.nightly
@pytest.mark.parametrize("version", VERSIONS[:-1])
def test_older_versions(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    server, failures, held = Megatron(version), {}, {}
    first, known = version == VERSIONS[0], tuple(map(int, version.split(".")))
    for recipe, capability in CAPABILITIES.items():
        if first and recipe == "nvfp4":
            continue  # which it does not have
        monkeypatch.setenv(CAPABILITY_VARIABLE, capability)
        for name, ranks, arguments in CHECKS:
            if name == "main_weights_quantized" and known < OLDEST_THAT_SHARDS.get(recipe, (99,)):
                continue
            try:
                found = server("in_groups", ranks, called, name, recipe, *arguments, tensor_model_parallel_size=ranks)
                held[recipe] = found[0]  # of the last check
            except AssertionError as error:
                failures[recipe, name] = str(error)[-1500:]
    server.close()
    assert not failures, failures
    numbers = TOKENS // 2 * WIDTH + TOKENS * WIDTH
    more = [recipe for recipe, most in held.items() if most > 1.05 * BYTES[recipe] * numbers]
    assert first or not more  # the first keeps both copies of a gradient
