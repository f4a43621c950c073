"""Megatron-LM's arguments as a model's configuration has them, which other training loops have in their place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

# Arguments whose field in the configuration has another name.
FIELDS = {
    "bias_swiglu_fusion": "bias_activation_fusion",
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
    "fp4_param_gather": "fp4_param",
    "fp8_param_gather": "fp8_param",
    "num_experts": "num_moe_experts",
    "swiglu": "gated_linear_unit",
    "te_rng_tracker": "use_te_rng_tracker",
}
_LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}


def layout_text(stages: Iterable[Iterable[Any]]) -> str:
    """Writes a layout as ``--pipeline-model-parallel-layout`` does.

    Args:
        stages: for each stage its layers: members of Megatron's ``LayerType``, or their names.
    """
    return "|".join("".join(_LETTERS[str(getattr(layer, "name", layer))] for layer in stage) for stage in stages)
