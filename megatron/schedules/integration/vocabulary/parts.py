"""A rank's parts of the embedding and of the output layer, as modules with ordinary parameters.

They have stock's names in the model, on every rank, and replace stock's modules on the first and last stage: the first
stage's forward takes the rows that all ranks have looked up, and the last stage's ends with the hidden states.

Stock initializes the tables where they are in its own pipelines, and the rows are scattered from there: a job that
starts from scratch starts from the same weights as one without vocabulary parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor

from megatron.schedules.integration.vocabulary.arithmetic import Cut
from megatron.schedules.runtime.control_messages import of_all_ranks

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
"""Stock's names of the two tables, in a model and in checkpoints."""
_EXTRA = "_extra_state"


class TokensSeen(BaseException):
    """A forward that runs ahead has reached its embedding; scripts must not catch it."""

    def __init__(self, tokens: Tensor) -> None:
        super().__init__("the forward of a microbatch ran ahead, for its tokens")
        self.tokens = tokens


class VocabularyPart(torch.nn.Module):
    """Rows of a table: tensor-parallel rank t has the t-th block as in stock, pipeline rank r the r-th piece of it.

    Args:
        weight: the rows, (entries, hidden).
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
        """Returns the weight through the module's forward, whose hooks gather updated parameters in stock."""
        return cast(Tensor, self(None))

    def forward(self, input: Any = None, *_: Any, **__: Any) -> Any:
        """Returns the weight."""
        return self.weight

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Sequence[Any] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Saves its position in the whole table, so that any other split can load it. Arguments as stock's."""
        key, copy = self._named(f"{prefix}weight")
        replica = int(copy), 0, _replica()
        position = 0, self._piece, self._pieces
        return {
            f"{prefix}weight": ShardedTensor.from_rank_offsets(
                key, self.weight, position, replica_id=replica, allow_shape_mismatch=True
            )
        }

    def _named(self, name: str) -> tuple[str, bool]:
        """Returns the name in checkpoints of the table ``name`` of the model, and whether this is its second copy."""
        return name, False


class EmbeddingPart(VocabularyPart):
    """A rank's part of the embedding; replaces stock's on the rank of stage 0.

    Args:
        weight: the rows.
        scatters: whether the result is (sequence / tensor-parallel ranks, microbatch, hidden) rather than (microbatch,
            sequence, hidden).
        deterministic: as stock's flag.

    Attributes:
        looked_up: the rows of the next forward's tokens, from all pipeline ranks.
        peeking: whether a forward runs only for its tokens.
    """

    def __init__(self, weight: torch.nn.Parameter, *, scatters: bool, deterministic: bool) -> None:
        super().__init__(weight)
        self._scatters, self.deterministic = scatters, deterministic
        self.looked_up: Tensor | None = None
        self.peeking = False

    def forward(self, input: Any = None, *_: Any, **__: Any) -> Any:
        """Returns the rows of the tokens ``input``, summed over tensor-parallel ranks."""
        if input is None:
            return self.weight
        if self.peeking:
            raise TokensSeen(input)
        rows, self.looked_up = self.looked_up, None
        if rows is None:
            raise RuntimeError("under vocabulary parallelism the embedding cannot run outside the schedule")
        group = parallel_state.get_tensor_model_parallel_group()
        if self._scatters:
            return mappings.reduce_scatter_to_sequence_parallel_region(rows.transpose(0, 1).contiguous(), group=group)
        return rows if group.size() == 1 else mappings.reduce_from_tensor_model_parallel_region(rows, group=group)


class OutputPart(VocabularyPart):
    """A rank's part of the output layer; replaces stock's on the rank of the last stage, whose forward ends before it.

    Args:
        weight: the rows.
        tied: whether they are a copy of the embedding's.
    """

    sequence_parallel = False  # stock reads this of its output layer, to gather its input

    def __init__(self, weight: torch.nn.Parameter, *, tied: bool) -> None:
        super().__init__(weight)
        self.tied = tied
        self._hidden: Tensor | None = None
        self._labels: Tensor | None = None
        self._register_load_state_dict_pre_hook(_with_extra_state)

    def forward(self, input: Any = None, *_: Any, **__: Any) -> Any:
        """Keeps the hidden states ``input`` and returns them in place of logits, which :meth:`losses` ignores."""
        if input is None:
            return self.weight
        self._hidden = input
        return input, None

    def losses(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Keeps ``labels``, (microbatch, sequence), and returns zeros for losses."""
        self._labels = labels
        return torch.zeros(labels.shape, dtype=torch.float32, device=labels.device)

    def take(self) -> tuple[Tensor, Tensor]:
        """Returns the hidden states and the labels of the forward that has just run.

        Raises:
            RuntimeError: it computed no loss, or one of its own.
        """
        hidden, labels, self._hidden, self._labels = self._hidden, self._labels, None, None
        if hidden is None or labels is None:
            raise RuntimeError(
                "--pipeline-vocabulary-parallel needs a forward step that passes labels to the model and uses the "
                "losses it returns: leave the flag out"
            )
        return hidden, labels

    def get_extra_state(self) -> None:
        """Returns None, as stock's output layer does."""

    def set_extra_state(self, state: Any) -> None:
        """Ignores ``state``, as stock's output layer does."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Sequence[Any] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Adds the empty extra state of stock's output layer, which hybrid models save and load; a GPT drops it."""
        name = f"{prefix}{_EXTRA}"
        state = ShardedObject(name, None, (1,), (0,), replica_id=(self._piece, 0, _replica()))
        return super().sharded_state_dict(prefix, sharded_offsets, metadata) | {name: state}

    def _named(self, name: str) -> tuple[str, bool]:
        return (name.removesuffix(OUTPUT) + EMBEDDING, True) if self.tied else super()._named(name)


def _with_extra_state(state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Lets a state without the empty extra state be loaded, as stock does."""
    state.setdefault(f"{prefix}{_EXTRA}")


def _replica() -> int:
    return int(parallel_state.get_data_parallel_rank(with_context_parallel=True))


class VocabularyParts(NamedTuple):
    """A rank's parts of both tables."""

    embedding: EmbeddingPart
    output: OutputPart


def parts_of(chunks: Sequence[torch.nn.Module]) -> VocabularyParts | None:
    """Returns the parts in a rank's chunks, wrapped or not; None without vocabulary parallelism."""
    embedding, output = next(_modules(chunks, EmbeddingPart), None), next(_modules(chunks, OutputPart), None)
    return None if embedding is None or output is None else VocabularyParts(embedding, output)


def _modules[P: VocabularyPart](chunks: Sequence[torch.nn.Module], kind: type[P]) -> Iterator[P]:
    return (module for chunk in chunks for module in chunk.modules() if isinstance(module, kind))


class _Table(NamedTuple):
    """Properties of a table on one rank, for all ranks.

    Args:
        rows, hidden: its size on a tensor-parallel rank.
        dtype: of its numbers.
        trained: whether it gets gradients.
        attributes: that stock has set on the parameter.
        settings: of its module.
    """

    rows: int
    hidden: int
    dtype: torch.dtype
    trained: bool
    attributes: dict[str, Any]
    settings: dict[str, bool]


def share_vocabulary(chunks: Sequence[torch.nn.Module], last_stage_rank: int) -> None:
    """Replaces the embedding of stage 0 and the output layer of the last stage by the parts of all ranks.

    Collective over the ranks of the pipeline.

    Args:
        chunks: this rank's, before Megatron wraps them.
        last_stage_rank: the pipeline rank with the output layer; stage 0 is on rank 0.
    """
    first = get_attr_wrapped_model(chunks[0], "pre_process", return_model_obj=True)
    last = get_attr_wrapped_model(chunks[-1], "post_process", return_model_obj=True)
    embedding = _embedding_table(first) if first.pre_process else None
    output = _output_table(last) if last.post_process else None
    group = parallel_state.get_pipeline_model_parallel_group()
    tables = of_all_ranks((embedding, output), group)
    embedding_table, output_table = tables[0][0], tables[last_stage_rank][1]
    if embedding_table is None or output_table is None:
        raise RuntimeError("--pipeline-vocabulary-parallel needs a language model: an embedding and an output layer")

    tied = output_table.settings["tied"]
    weight = first.embedding.word_embeddings.weight if embedding is not None else None
    part = _scattered(weight, embedding_table, source=0)
    if tied:
        copy = torch.nn.Parameter(part.detach().clone(), requires_grad=output_table.trained)
        output_part = OutputPart(_with_attributes(copy, output_table), tied=True)
    else:
        weight = last.output_layer.weight if output is not None else None
        output_part = OutputPart(_scattered(weight, output_table, source=last_stage_rank), tied=False)
    embedding_part = EmbeddingPart(part, **embedding_table.settings)
    if embedding is None:
        first.embedding = MegatronModule(first.config)
    first.embedding.word_embeddings = embedding_part
    last.output_layer = output_part
    if output is not None:
        last.compute_language_model_loss = output_part.losses
    if tied:  # stock's would split along tensor-parallel ranks alone; each part saves its own position
        last.tie_embeddings_and_output_weights_state_dict = lambda *_, **__: None


def _embedding_table(model: Any) -> _Table:
    module = model.embedding.word_embeddings
    settings = {"scatters": module.reduce_scatter_embeddings, "deterministic": module.deterministic_mode}
    return _table(module.weight, settings)


def _output_table(model: Any) -> _Table:
    if getattr(model.output_layer, "bias", None) is not None:
        raise RuntimeError("--pipeline-vocabulary-parallel does not work with a bias after the output layer")
    return _table(model.output_layer.weight, {"tied": model.share_embeddings_and_output_weights})


def _table(weight: torch.nn.Parameter, settings: dict[str, bool]) -> _Table:
    plain = {name: value for name, value in vars(weight).items() if isinstance(value, bool | int | float | str)}
    return _Table(len(weight), weight.size(1), weight.dtype, weight.requires_grad, plain, settings)


def _scattered(whole: Tensor | None, table: _Table, source: int) -> torch.nn.Parameter:
    """Returns this rank's rows of the table that the ``source`` of the pipeline has as ``whole``."""
    group = parallel_state.get_pipeline_model_parallel_group()
    rows, rest = divmod(table.rows, group.size())
    if rest:
        raise RuntimeError(
            f"{table.rows} vocabulary entries on a tensor-parallel rank do not divide by {group.size()} pipeline ranks"
        )
    device = torch.empty(0, device="cuda").device
    own = torch.empty(rows, table.hidden, dtype=table.dtype, device=device)
    pieces = None if whole is None else [piece.contiguous() for piece in whole.detach().to(device).chunk(group.size())]
    dist.scatter(own, pieces, group_src=source, group=group)
    return _with_attributes(torch.nn.Parameter(own, requires_grad=table.trained), table)


def _with_attributes(parameter: torch.nn.Parameter, table: _Table) -> torch.nn.Parameter:
    vars(parameter).update(table.attributes)
    return parameter
