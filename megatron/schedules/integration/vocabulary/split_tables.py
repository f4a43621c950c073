"""Replaces the whole tables in chunks that stock has built by a rank's parts of the vocabulary.

Stock initializes the tables where they are in its own pipelines, and the rows are scattered from there: a job that
starts from scratch starts from the same weights as one without vocabulary parallelism.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor

from megatron.schedules.integration.vocabulary.parts import EmbeddingPart, OutputPart


class Table(NamedTuple):
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
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, (embedding, output), group=group)
    embedding_table, output_table = found[0][0], found[last_stage_rank][1]
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


def _embedding_table(model: Any) -> Table:
    module = model.embedding.word_embeddings
    settings = {"scatters": module.reduce_scatter_embeddings, "deterministic": module.deterministic_mode}
    return _table(module.weight, settings)


def _output_table(model: Any) -> Table:
    if getattr(model.output_layer, "bias", None) is not None:
        raise RuntimeError("--pipeline-vocabulary-parallel does not work with a bias after the output layer")
    return _table(model.output_layer.weight, {"tied": model.share_embeddings_and_output_weights})


def _table(weight: torch.nn.Parameter, settings: dict[str, bool]) -> Table:
    plain = {name: value for name, value in vars(weight).items() if isinstance(value, bool | int | float | str)}
    return Table(len(weight), weight.size(1), weight.dtype, weight.requires_grad, plain, settings)


def _scattered(whole: Tensor | None, table: Table, source: int) -> torch.nn.Parameter:
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


def _with_attributes(parameter: torch.nn.Parameter, table: Table) -> torch.nn.Parameter:
    vars(parameter).update(table.attributes)
    return parameter
