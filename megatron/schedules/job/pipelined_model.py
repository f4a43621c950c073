"""The model of ``--model`` on the ranks of a pipeline, and their memory."""

from __future__ import annotations

import math

from megatron.schedules.estimate.device_memory import RankMemory
from megatron.schedules.estimate.model_build import rank_memory, trained_model, with_model
from megatron.schedules.estimate.models import built, find_model
from megatron.schedules.estimate.times import loads
from megatron.schedules.measure.cost_profile import Profile
from megatron.schedules.planner.service import Plan
from megatron.schedules.schedule.costs import Costs


class PipelinedModel:
    """A model cut into a pipeline.

    Args:
        model: its name, or a file of Megatron's flags.
        ranks: of the pipeline.
        microbatches: of an iteration.
        shared: whether vocabulary parallelism is on.
    """

    def __init__(self, model: str, ranks: int, microbatches: int, *, shared: bool) -> None:
        args = find_model(model).trained(pipeline_model_parallel_size=ranks)
        samples, batch = args.micro_batch_size * microbatches, args.global_batch_size or 0
        self._data = batch // samples if batch and batch % samples == 0 else 1
        args.world_size = math.prod((args.tensor_model_parallel_size, args.context_parallel_size, ranks, self._data))
        self._args, self._shared = args, shared
        self._model = trained_model(args, built(args, shared=shared))
        self.layers = self._model.build.shape.layers

    @property
    def times(self) -> Costs:
        """F, I and W by the model's arithmetic."""
        return Costs(*loads(self._model.build).ratio)

    def costs(self, costs: Costs, stages: int, profile: Profile | None, *, placed: bool) -> Costs:
        """Adds the parts of the model to ``costs``; see :func:`.model_build.with_model`."""
        return with_model(costs, self._model, stages, shared=self._shared, placed=placed, profile=profile)

    @property
    def message_bytes(self) -> float:
        """One microbatch's hidden states on one rank."""
        return self._model.message_bytes

    def ranks(self, plan: Plan) -> tuple[RankMemory, ...]:
        """Memory of each rank in ``plan``, made for :meth:`costs`."""
        return rank_memory(self._model, plan.schedule, plan.costs, plan.request)

    def __str__(self) -> str:
        """The parallel and batch sizes that bytes are counted for."""
        args = self._args
        sizes = {"tensor": args.tensor_model_parallel_size, "context": args.context_parallel_size, "data": self._data}
        parallel = ", ".join(f"{name} {size}" for name, size in sizes.items())
        numbers = "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32"
        shared = "with" if args.use_distributed_optimizer else "without"
        return f"micro batch {args.micro_batch_size}, {parallel} parallel, {numbers}, {shared} distributed optimizer"
