"""Parallel sizes of a job, and the ranks that share its parts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ParallelSizes:
    """Parallel sizes.

    Args:
        world: processes of the job.
        tensor, pipeline, context, expert, expert_tensor: ranks of each kind of parallelism.
        has_experts: true if layers have experts.
        optimizer_instances: copies of a distributed optimizer's state; 0 if it is not distributed.
    """

    world: int
    pipeline: int
    tensor: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    has_experts: bool = False
    optimizer_instances: int = 0

    @property
    def of_replica(self) -> int:
        """Ranks of one replica of the model."""
        return self.tensor * self.pipeline * self.context

    @property
    def least_world(self) -> int:
        """Fewest processes on which all parts of the model fit."""
        experts = self.expert_tensor * self.expert if self.has_experts else 1
        return self.pipeline * math.lcm(self.tensor * self.context, experts)

    @property
    def optimizer_shared_by(self) -> tuple[int, int]:
        """Ranks that share the optimizer's state of dense parameters, and of experts'."""
        if not self.optimizer_instances:
            return 1, 1
        dense, experts = self.tensor * self.pipeline, self.expert_tensor * self.expert * self.pipeline
        sharing = self.world // self.optimizer_instances
        return max(1, sharing // dense), max(1, sharing // experts)

    def divisible(self, words: int, multiple: int) -> int:
        """Smallest vocabulary, at least ``words``, that all tensor and pipeline ranks share evenly.

        Args:
            words: size of the vocabulary as Megatron pads it.
            multiple: Megatron pads the words of each tensor-parallel rank to a multiple of this.
        """
        if words % (self.tensor * self.pipeline) == 0:
            return words
        whole = self.tensor * math.lcm(multiple, self.pipeline)
        return -(-words // whole) * whole


def sizes_of(args: Any, world: int = 0) -> ParallelSizes:
    """Returns the sizes in Megatron's ``args``, parsed or validated, for a job of ``world`` processes."""
    return ParallelSizes(
        world,
        args.pipeline_model_parallel_size,
        args.tensor_model_parallel_size,
        args.context_parallel_size,
        args.expert_model_parallel_size,
        args.expert_tensor_parallel_size or args.tensor_model_parallel_size,
        bool(args.num_experts),
        args.num_distributed_optimizer_instances if args.use_distributed_optimizer else 0,
    )
