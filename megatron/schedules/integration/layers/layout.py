"""The transformer layers of each model chunk, in the form that stock Megatron reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from itertools import chain
from typing import Any

from megatron.core import parallel_state
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from megatron.schedules.schedule.placement import Placement


class PlacedLayout(PipelineParallelLayerLayout):
    """Stock's layer layout for a placement that stock does not have, such as the V.

    Stock numbers stages round the ranks; only the attributes and methods below depend on that. The object passes
    through Megatron's configuration unchanged.

    Args:
        placement: rank of each stage.
        layers: decoder layers of each stage, in model order.
        ahead: layers of multi-token prediction, all on the last stage.
    """

    def __init__(self, placement: Placement, layers: Sequence[int], ahead: int = 0) -> None:
        self.placement = placement
        by_stage = [[LayerType.decoder] * count for count in layers]
        by_stage[0].insert(0, LayerType.embedding)
        by_stage[-1] += [LayerType.mtp] * ahead + [LayerType.loss]
        self.input_data = str(placement)
        self.pipeline_model_parallel_size = placement.ranks
        self.virtual_pipeline_model_parallel_size = placement.chunks
        self.layout = [[by_stage[s] for s in placement.stages_of(rank)] for rank in range(placement.ranks)]
        self.flatten_layout = [layer for stage in by_stage for layer in stage]

    def validate_layer_layout(self, num_layers: int, mtp_num_layers: int | None) -> bool:
        """Runs stock's checks; returns False: prediction layers are always with the output layer."""
        super().validate_layer_layout(num_layers=num_layers, mtp_num_layers=mtp_num_layers)
        return False

    def get_layer_offset(
        self,
        layer_type: LayerType = LayerType.decoder,
        vp_stage: int | None = None,
        pp_rank: int | None = None,
    ) -> int:
        """Returns how many layers of ``layer_type`` come before chunk ``vp_stage`` of rank ``pp_rank`` in the model."""
        if pp_rank is None:
            pp_rank = parallel_state.get_pipeline_model_parallel_rank()
        return self._before[self.placement.stages_of(pp_rank)[vp_stage or 0]][layer_type]

    @cached_property
    def _before(self) -> list[Counter[LayerType]]:
        """By stage, the layers before it. Each forward of a layer asks."""
        stages = range(self.placement.stages)
        return [Counter(chain(*map(self.of_stage, stages[:stage]))) for stage in stages]

    def of_stage(self, stage: int) -> list[LayerType]:
        """Returns the layers of a stage."""
        rank = self.placement.rank_of[stage]
        return self.layout[rank][self.placement.chunk_of(stage)]

    # Arguments and configurations are copied often, and this never changes.
    def __copy__(self) -> PlacedLayout:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> PlacedLayout:
        return self
