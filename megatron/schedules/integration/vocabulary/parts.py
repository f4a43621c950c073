"""A rank's parts of the embedding and of the output layer, as modules with ordinary parameters.

They bear stock's names in the model, on every rank, and stand in for stock's modules on the ranks of the ends: there
the first stage's forward takes what all ranks have looked up, and the last's ends with the hidden states.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.tensor_parallel import mappings
from torch import Tensor

from megatron.schedules.integration.vocabulary.arithmetic import Cut

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
"""What stock calls the two tables, in a model and in checkpoints."""


class WordsSeen(BaseException):
    """A forward run ahead has come to its embedding; not for scripts to catch."""

    def __init__(self, words: Tensor) -> None:
        super().__init__("the forward of a microbatch run ahead, for its words")
        self.words = words


class Part(torch.nn.Module):
    """Rows of a table: tensor-parallel rank t has the t-th block of them as in stock, pipeline rank r its r-th piece.

    Args:
        weight: the rows, (words, hidden).
    """

    def __init__(self, weight: torch.nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        pipeline = parallel_state.get_pipeline_model_parallel_group()
        tensor = parallel_state.get_tensor_model_parallel_group()
        self._piece = tensor.rank() * pipeline.size() + pipeline.rank()
        self._pieces = tensor.size() * pipeline.size()
        self.cut = Cut(self._piece * len(weight), len(weight))

    def rows(self) -> Tensor:
        """The weight, after all that waits for a module's forward: stock gathers updated parameters then."""
        return cast(Tensor, self(None))

    def forward(self, given: Any = None, *_: Any, **__: Any) -> Any:
        """The weight."""
        return self.weight

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Sequence[Any] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Its place in the whole table, which any other cut can read. Arguments as stock's; there are no offsets."""
        key, copy = self._named(f"{prefix}weight")
        replica = int(copy), 0, parallel_state.get_data_parallel_rank(with_context_parallel=True)
        place = 0, self._piece, self._pieces
        return {
            f"{prefix}weight": ShardedTensor.from_rank_offsets(
                key, self.weight, place, replica_id=replica, allow_shape_mismatch=True
            )
        }

    def _named(self, name: str) -> tuple[str, bool]:
        """What checkpoints call the table that is ``name`` in the model, and whether this is its second copy."""
        return name, False


class EmbeddingPart(Part):
    """A rank's part of the embedding; on stage 0's in the place of stock's.

    Args:
        weight: the rows.
        scatters: whether what is looked up goes on as (sequence / tensor-parallel ranks, microbatch, hidden) rather
            than as (microbatch, sequence, hidden).
        deterministic: as stock's flag.
    """

    def __init__(self, weight: torch.nn.Parameter, *, scatters: bool, deterministic: bool) -> None:
        super().__init__(weight)
        self._scatters, self.deterministic = scatters, deterministic
        self.brought: Tensor | None = None
        self.peeking = False

    def forward(self, given: Any = None, *_: Any, **__: Any) -> Any:
        """What all pipeline ranks have looked up for the words ``given``, now of all tensor-parallel ranks."""
        if given is None:
            return self.weight
        if self.peeking:
            raise WordsSeen(given)
        brought, self.brought = self.brought, None
        if brought is None:
            raise RuntimeError(
                "the embedding is shared by the pipeline's ranks: a forward of its own has no words' rows"
            )
        group = parallel_state.get_tensor_model_parallel_group()
        if self._scatters:
            return mappings.reduce_scatter_to_sequence_parallel_region(
                brought.transpose(0, 1).contiguous(), group=group
            )
        return brought if group.size() == 1 else mappings.reduce_from_tensor_model_parallel_region(brought, group=group)


class OutputPart(Part):
    """A rank's part of the output layer; on the last stage's in the place of stock's, whose forward ends before it.

    Args:
        weight: the rows.
        tied: whether they are a copy of the embedding's.
    """

    sequence_parallel = False  # stock asks its output layer, to gather what comes in before it

    def __init__(self, weight: torch.nn.Parameter, *, tied: bool) -> None:
        super().__init__(weight)
        self.tied = tied
        self._hidden: Tensor | None = None
        self._labels: Tensor | None = None

    def forward(self, given: Any = None, *_: Any, **__: Any) -> Any:
        """Keep the hidden states ``given``, and pass them for logits: :meth:`losses` does not look at them."""
        if given is None:
            return self.weight
        self._hidden = given
        return given, None

    def losses(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Keep ``labels``, (microbatch, sequence), and give zeros for losses."""
        self._labels = labels
        return torch.zeros(labels.shape, dtype=torch.float32, device=labels.device)

    def take(self) -> tuple[Tensor, Tensor]:
        """The hidden states and the labels of the forward that has just run.

        Raises:
            RuntimeError: where it computed no loss, or one of its own.
        """
        hidden, labels, self._hidden, self._labels = self._hidden, self._labels, None, None
        if hidden is None or labels is None:
            raise RuntimeError(
                "a shared vocabulary needs a forward step that gives the model its labels and takes the losses it "
                "returns: leave out --pipeline-vocabulary-parallel"
            )
        return hidden, labels

    def _named(self, name: str) -> tuple[str, bool]:
        return (name.removesuffix(OUTPUT) + EMBEDDING, True) if self.tied else super()._named(name)


class Parts(NamedTuple):
    """What a rank has of both tables."""

    embedding: EmbeddingPart
    output: OutputPart


def parts_of(chunks: Sequence[torch.nn.Module]) -> Parts | None:
    """Those in a rank's chunks, wrapped or not; None where the vocabulary is not shared."""
    embedding, output = next(_modules(chunks, EmbeddingPart), None), next(_modules(chunks, OutputPart), None)
    return None if embedding is None or output is None else Parts(embedding, output)


def _modules[P: Part](chunks: Sequence[torch.nn.Module], kind: type[P]) -> Iterator[P]:
    return (module for chunk in chunks for module in chunk.modules() if isinstance(module, kind))
