"""Hyper-connections: several residual streams, which are mixed around each part of a layer."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron.schedules.estimate.activations import activations
from megatron.schedules.estimate.build import Build
from megatron.schedules.estimate.build_flags import residual_streams
from megatron.schedules.estimate.device_memory import NOTHING, Numbers, Recompute
from megatron.schedules.estimate.model_build import TrainedModel
from megatron.schedules.estimate.models import MODELS
from megatron.schedules.estimate.parts import Kept, around_part
from megatron.schedules.estimate.times import loads

STREAMS, TOKENS, HIDDEN = 4, 32, 256


def llama(streams: int = STREAMS) -> Build:
    return replace(MODELS["Llama-3-8B"].whole, streams=streams)


def connected(streams: Tensor, maps: Tensor) -> Tensor:
    """A part with its hyper-connections, as in arXiv 2512.24880 without the projection of its maps."""
    flat = streams.flatten(1)
    found = (flat @ maps) / flat.norm(dim=-1, keepdim=True)
    before, after, mix = found[:, :STREAMS], found[:, STREAMS : 2 * STREAMS], found[:, 2 * STREAMS :]
    given = (before[:, :, None] * streams).sum(1)
    result = torch.nn.functional.silu(given)  # keeps what it is given, as a norm does
    return mix.view(-1, STREAMS, STREAMS) @ streams + after[:, :, None] * result[:, None]


def test_a_part_keeps_the_streams_its_input_and_what_it_gives() -> None:
    streams = torch.randn(TOKENS, STREAMS, HIDDEN, requires_grad=True)
    maps = torch.randn(STREAMS * HIDDEN, STREAMS * (STREAMS + 2), requires_grad=True)
    kept: dict[int, int] = {}

    def noted(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(noted, lambda tensor: tensor):
        mixed = connected(streams, maps)
    assert mixed.shape == streams.shape
    small = HIDDEN * TOKENS * 4  # maps have a few numbers for each token
    large = sum(size for storage, size in kept.items() if size >= small and storage != maps.data_ptr())
    build = replace(llama(), shape=replace(llama().shape, hidden=HIDDEN), residual=4)
    assert sum(piece.forward for piece in around_part(build, Kept()).values()) * TOKENS == large


def test_what_megatron_recomputes_of_them_leaves_what_parts_give() -> None:
    hidden = 2 * llama().shape.hidden
    layer = activations(llama()).layers[0]
    recomputed = sum(layer[part].forward for part in Recompute(modules=("mhc",)).parts)
    assert recomputed == 2 * (STREAMS + 1) * hidden
    assert layer["inputs"].forward == 2 * hidden
    assert "mhc" not in activations(llama(1)).layers[0]


def test_stages_send_all_streams_and_recomputed_layers_keep_them() -> None:
    several, one = (TrainedModel(llama(each), Numbers(2, 4, 12), NOTHING) for each in (STREAMS, 1))
    assert several.message_bytes == STREAMS * one.message_bytes
    assert activations(several.build).input == STREAMS * activations(one.build).input


def test_mixing_them_moves_memory_in_f_and_more_in_i() -> None:
    several, one = loads(llama()).mean, loads(llama(1)).mean
    forward, input_grad = several.forward - one.forward, several.input_grad - one.input_grad
    assert 0 < forward < input_grad
    assert several.weight_grad == one.weight_grad


@pytest.mark.parametrize(
    ("on", "number"),
    [("enable_hyper_connections", "num_residual_streams"), ("enable_mhc_connections", "mhc_num_residual_streams")],
)
def test_they_are_read_where_they_are_on(on: str, number: str) -> None:
    assert residual_streams(Namespace(**{on: True, number: 3})) == 3
    assert residual_streams(Namespace(**{on: False, number: 3})) == residual_streams(Namespace()) == 1
