"""Mamba layers whose mixer needs no GPU: two linears of Transformer Engine around a gated causal filter.

Stock's ``--spec tests.integration.plain_mixer STACK`` puts them into a hybrid model.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor


class PlainMixer(MegatronModule):
    """Adds to each token a share of the one before it."""

    def __init__(self, config: Any, submodules: Any, d_model: int, pg_collection: Any, **_: Any) -> None:
        super().__init__(config)
        settings = {"config": config, "init_method": config.init_method, "bias": False, "is_expert": False}
        settings["tp_group"] = pg_collection.tp
        self.in_proj = build_module(
            submodules.in_proj, d_model, 2 * d_model, gather_output=False, skip_bias_add=False, **settings
        )
        self.share = torch.nn.Parameter(torch.full((d_model,), 0.5))
        self.out_proj = build_module(
            submodules.out_proj, d_model, d_model, input_is_parallel=True, skip_bias_add=True, **settings
        )

    def forward(self, hidden: Tensor, **_: Any) -> Any:
        values, gates = self.in_proj(hidden)[0].chunk(2, dim=-1)
        before = torch.nn.functional.pad(values, (0, 0, 0, 0, 1, 0))[:-1]
        return self.out_proj((values + self.share * before) * torch.nn.functional.silu(gates))


STACK = copy.deepcopy(hybrid_stack_spec)
STACK.submodules.mamba_layer.submodules.mixer.module = PlainMixer
