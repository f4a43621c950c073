"""Stock megatron-core's pipeline schedules on passes that sleep: its functions, its point-to-point messages."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from benchmarks.emulated_passes import SHAPE, Layers, Passes
from megatron.schedules.schedule.kinds import Kind
from megatron.schedules.schedule.placement import Placement


def sleeping(passes: Passes, stage: int) -> Layers:
    """A stage that keeps nothing for its backward."""
    return Layers(passes, stage, Kind.B)


def start(
    placement: Placement,
    microbatches: int,
    passes: Passes,
    layers: Callable[[Passes, int], nn.Module] = sleeping,
) -> Callable[[], None]:
    """Returns a function that runs stock's 1F1B, interleaved with several chunks, once on stages of ``layers``."""
    _without_cuda()
    config = _config(placement)
    chunks = [_Chunk(config, layers(passes, stage)) for stage in placement.stages_of(dist.get_rank())]
    several = placement.chunks > 1
    function = (
        schedules.forward_backward_pipelining_with_interleaving
        if several
        else schedules.forward_backward_pipelining_without_interleaving
    )
    arguments = {
        "forward_step_func": _forward_step,
        "data_iterator": [None] * len(chunks) if several else None,
        "model": chunks if several else chunks[0],
        "num_microbatches": microbatches,
        "seq_length": SHAPE[0],
        "micro_batch_size": SHAPE[1],
        "p2p_communicator": P2PCommunicator(pp_group=dist.group.WORLD, config=config),
        "pg_collection": _groups(),
    }
    return lambda: function(**arguments)


def _config(placement: Placement) -> TransformerConfig:
    """Returns the configuration that Megatron's arguments give: interleaved overlaps its messages."""
    several = placement.chunks > 1
    return TransformerConfig(
        num_layers=placement.stages,
        hidden_size=SHAPE[2],
        num_attention_heads=1,
        pipeline_dtype=torch.float32,
        pipeline_model_parallel_size=placement.ranks,
        virtual_pipeline_model_parallel_size=placement.chunks if several else None,
        microbatch_group_size_per_vp_stage=placement.ranks,
        overlap_p2p_comm=several,
        batch_p2p_comm=not several,
        deallocate_pipeline_outputs=True,
    )


@cache
def _without_cuda() -> None:
    """Replaces what these functions use of CUDA; the whole stand-in would slow down every torch call."""
    zeros = torch.zeros

    def on_the_cpu(*size: Any, device: Any = None, **rest: Any) -> Tensor:
        return zeros(*size, device="cpu" if device == "cuda" else device, **rest)

    torch.zeros = on_the_cpu
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda device=None: None


@cache
def _groups() -> ProcessGroupCollection:
    """Returns groups of one rank, except for the pipeline."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    groups = ProcessGroupCollection()
    groups.tp = groups.cp = alone
    return groups


class _Chunk(nn.Module):
    model_type = ModelType.encoder_or_decoder

    def __init__(self, config: TransformerConfig, layers: nn.Module) -> None:
        super().__init__()
        self.config, self.layers = config, layers
        self._input: Tensor | None = None

    def set_input_tensor(self, tensors: list[Tensor | None]) -> None:
        self._input = tensors[0]

    def forward(self) -> Tensor:
        output: Tensor = self.layers(torch.zeros(SHAPE) if self._input is None else self._input)
        return output


def _forward_step(data: Any, chunk: _Chunk) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]]]:
    return chunk(), lambda output: (output.sum(), {})
