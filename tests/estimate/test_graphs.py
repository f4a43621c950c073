"""What CUDA graphs of layers add to the activations of a plan."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from types import SimpleNamespace

import pytest

from megatron.schedules.estimate.activations import activations, whole
from megatron.schedules.estimate.build_flags import as_built
from megatron.schedules.estimate.models import find_model

EXPERTS = "Llama-3-8B --num-experts 8 --moe-router-topk 2"
Module = Enum("Module", "attn mlp moe_router moe_preprocess")


@pytest.mark.parametrize(
    ("name", "graphs", "states"),
    [
        ("Llama-3-8B", None, 0),
        ("Llama-3-8B", [], 1),
        ("Llama-3-8B", ["attn"], 0),
        ("Llama-3-8B", ["mlp"], 0),
        (EXPERTS, ["attn", "moe_router"], 0),
        (EXPERTS, ["attn", "moe_router", "moe_preprocess"], 2),
    ],
)
def test_a_graph_keeps_hidden_states_beside_the_activations(name: str, graphs: list[str] | None, states: int) -> None:
    """Of a whole layer its input; tokens that are permuted in a graph and sent to experts, here to two of them each."""
    build = find_model(name).whole
    plain = whole(activations(build).layers[1])
    parts = None if graphs is None else frozenset(graphs)
    found = whole(activations(replace(build, graphs=parts)).layers[1])
    assert found.forward - plain.forward == states * build.number * build.shape.hidden
    assert found.weights == plain.weights


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ({"cuda_graph_impl": "none", "cuda_graph_modules": []}, None),
        ({"cuda_graph_impl": "transformer_engine"}, None),
        ({"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": "full"}, frozenset()),
        ({"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": []}, frozenset()),
        ({"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": [Module.attn]}, frozenset(["attn"])),
        (
            {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": [Module.moe_router, Module.moe_preprocess]},
            frozenset(["moe_router", "moe_preprocess"]),
        ),
    ],
)
def test_flags_say_what_is_captured(flags: dict[str, object], parts: frozenset[str] | None) -> None:
    sent = {"moe_token_dispatcher_type": "alltoall", "expert_model_parallel_size": 2}
    model = find_model(EXPERTS)
    args = SimpleNamespace(**vars(model.args) | sent | flags)
    assert as_built(args, model.whole.shape).graphs == parts
