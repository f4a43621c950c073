"""What CUDA graphs and fused experts change in the estimates of a plan."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from types import SimpleNamespace

import pytest

from megatron.schedules.estimate.activations import activations, whole
from megatron.schedules.estimate.build_flags import WHOLE, as_built, graphs_impl
from megatron.schedules.estimate.device_memory import NOTHING, Numbers
from megatron.schedules.estimate.model_build import TrainedModel, hidden_states
from megatron.schedules.estimate.models import find_model
from megatron.schedules.estimate.times import loads
from megatron.schedules.planner.registry import Request, plan
from megatron.schedules.schedule.graph_slots import graph_slots

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


@pytest.mark.parametrize(
    ("flags", "captured"),
    [
        ({"cuda_graph_impl": "full_iteration"}, True),
        ({"cuda_graph_impl": "local", "cuda_graph_scope": ["full_iteration"]}, True),
        ({"cuda_graph_impl": "local", "cuda_graph_modules": "full_iteration"}, True),
        ({"cuda_graph_impl": "local", "cuda_graph_scope": ["attn"]}, False),
        ({"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": []}, False),
    ],
)
def test_flags_new_and_old_say_that_iterations_are_captured(flags: dict[str, object], captured: bool) -> None:
    model = find_model(EXPERTS)
    args = SimpleNamespace(**vars(model.args) | flags)
    assert as_built(args, model.whole.shape).captured == captured
    assert (graphs_impl(args) == WHOLE) == captured


def test_the_weight_gradients_of_fused_experts_are_in_i() -> None:
    """And of no other linear; what they would keep from I to W is not kept."""
    plain = find_model(EXPERTS).whole
    fused = replace(plain, fused_experts=True)
    (before,), (after,) = ({part.split for part in loads(build).layers} for build in (plain, fused))
    assert after.forward == before.forward and 0 < after.weight_grad < before.weight_grad / 2
    assert after.input_grad + after.weight_grad == pytest.approx(before.input_grad + before.weight_grad)
    kept, of_others = (activations(build).layers[1] for build in (fused, plain))
    assert kept["moe"].weights == 0 < of_others["moe"].weights
    assert {name: part for name, part in kept.items() if name != "moe"} == {
        name: part for name, part in of_others.items() if name != "moe"
    }
    dense = find_model("Llama-3-8B").whole
    assert loads(replace(dense, fused_experts=True)) == loads(dense)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-1p", "v-half"])
def test_a_rank_holds_the_gradient_of_an_output_for_each_slot(schedule: str) -> None:
    whole = find_model("Llama-3-8B").whole
    made = plan(Request(schedule, 4, 24))
    plain, graphed = (TrainedModel(replace(whole, graphs=of), Numbers(2, 4, 12), NOTHING) for of in (None, frozenset()))
    messages = [3, 1, 4, 2]
    slots = [1 + max(slot.number for slot in graph_slots(row).values()) for row in made.order]
    assert list(hidden_states(plain, made, messages)) == messages
    assert [many - few for many, few in zip(hidden_states(graphed, made, messages), messages, strict=True)] == slots


@pytest.mark.parametrize(
    ("graphs", "masks"),
    [
        (None, 0),
        ([], 1),
        (["attn"], 1),
        (["attn", "moe_router"], 1),
        (["mlp"], 0),
        (["moe_router", "moe_preprocess"], 0),
    ],
)
def test_graphs_with_attention_read_one_mask(graphs: list[str] | None, masks: int) -> None:
    """A byte for each pair of tokens of each sample."""
    whole = replace(find_model("Llama-3-8B").whole, samples=2, graphs=None if graphs is None else frozenset(graphs))
    assert TrainedModel(whole, Numbers(2, 4, 12), NOTHING).graph_mask_bytes == masks * 2 * 8192**2
