"""Work that the model's modules defer to later passes: weight gradients, recomputes, offloaded activations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from megatron.schedules.integration.flags.planner import Planner
from megatron.schedules.integration.layers.recomputed_layers import capture_state, recompute_layers
from megatron.schedules.integration.linears.local import split_linears
from megatron.schedules.integration.linears.transformer_engine import split_te_linears
from megatron.schedules.integration.offloaded_layers import offloads_of
from megatron.schedules.runtime.activation_meter import ActivationMeter
from megatron.schedules.runtime.offload import Offloads
from megatron.schedules.runtime.program import Program
from megatron.schedules.runtime.recompute import Recomputes
from megatron.schedules.runtime.weight_gradients import WeightGradients

Chunks = Sequence[torch.nn.Module]


class Deferred(NamedTuple):
    """Work that one pass defers to another.

    Args:
        store: weight gradients that wait for W.
        recompute: forwards that wait for R; None in a program without R.
        offloads: activations that are offloaded between O and L; None in a program without O.
    """

    store: WeightGradients
    recompute: Recomputes | None = None
    offloads: Offloads | None = None

    def assert_empty(self) -> None:
        """Raises an error if deferred work remains after all passes."""
        for each in self:
            if each is not None:
                each.assert_empty()


class ModelBinding:
    """Changes the modules of a rank's model when a program first needs it.

    Args:
        planner: has the layers that are recomputed and offloaded.

    Attributes:
        offloads: offloaded activations; None before a program with O.
    """

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self._store: WeightGradients | None = None
        self._recompute: Recomputes | None = None
        self.offloads: Offloads | None = None

    @property
    def host_bytes(self) -> int:
        """Host memory used for this rank's offloaded activations, bytes."""
        return 0 if self.offloads is None else self.offloads.host_bytes

    def bind(self, chunks: Chunks, program: Program, meter: ActivationMeter | None) -> Deferred:
        """Prepares the modules of ``chunks`` for ``program`` and returns its deferred work.

        Args:
            chunks: model chunks of this rank.
            program: the next program to run.
            meter: counts tensors in this call; None for no counting.
        """
        stages = program.placement.stages_of(program.rank)
        if program.has_offload and self.offloads is None:
            self.offloads, self._store = offloads_of(chunks, stages, self._planner.layers_offloaded), None
        if self.offloads is not None:
            self.offloads.meter = meter
        if program.has_recompute and self._recompute is None:
            self._recompute = Recomputes(capture_state)
            for chunk, stage in zip(chunks, stages, strict=True):
                which = self._planner.recomputed_layers
                recompute_layers(chunk, None if which is None else which[stage], self._recompute)
        return Deferred(
            self.weight_gradients(chunks, meter),
            self._recompute if program.has_recompute else None,
            self.offloads if program.has_offload else None,
        )

    def weight_gradients(self, chunks: Chunks, meter: ActivationMeter | None = None) -> WeightGradients:
        """Queue of weight gradients for the linears of ``chunks``.

        All calls share one queue, except calls in which a meter counts.
        """
        store = self._store
        if store is None or meter is not None:
            store = WeightGradients(meter, hooked=self.offloads is not None)
            for chunk in chunks:
                split_linears(chunk, store)
                split_te_linears(chunk, store)
        self._store = store if meter is None else None
        return store
