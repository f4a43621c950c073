"""Models by name, or by a file of Megatron's flags."""

from __future__ import annotations

import argparse
import copy
import difflib
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron.schedules.estimate import megatron_flags
from megatron.schedules.estimate.build import Build
from megatron.schedules.estimate.build_flags import as_built
from megatron.schedules.estimate.parameters import parameters
from megatron.schedules.estimate.symbols import layer_flops, output_layer
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.parsing import read_text


@dataclass(frozen=True)
class Model:
    """A model.

    Args:
        name: its name, or the name of its file.
        flags: Megatron's flags; the last of equal ones counts.
    """

    name: str
    flags: str

    @cached_property
    def args(self) -> argparse.Namespace:
        """The parsed flags, for one pipeline rank. The micro batch size defaults to 1.

        Raises:
            PlanError: if they describe no model.
        """
        args = megatron_flags.parse(self.flags, self.name)
        args.micro_batch_size = args.micro_batch_size or 1
        args.pipeline_model_parallel_size = 1
        args.world_size = args.tensor_model_parallel_size * args.context_parallel_size
        return args

    def trained(self, **changes: Any) -> argparse.Namespace:
        """Returns the parsed flags with ``changes``."""
        args = copy.copy(self.args)
        vars(args).update(changes)
        return args

    def of_length(self, tokens: int) -> Model:
        """Returns the same model with samples of ``tokens`` tokens."""
        return Model(self.name, f"{self.flags} --seq-length {tokens} --max-position-embeddings {tokens}")

    @property
    def sequence(self) -> int:
        """Tokens of a sample."""
        return int(self.args.seq_length)

    @cached_property
    def whole(self) -> Build:
        """The model on a single GPU."""
        return built(self.trained(tensor_model_parallel_size=1, expert_model_parallel_size=1))

    @property
    def parameters(self) -> float:
        """Parameters of the whole model. The embedding counts once, as in the model names of the paper."""
        counts = parameters(self.whole)
        return sum(layer.all for layer in counts.layers) + counts.table.all + counts.last.all

    @cached_property
    def flops_a_token(self) -> float:
        """FLOPs per token of forward and backward without recompute.

        Causal attention counts half, as in Megatron's logs.
        """
        layers = self.whole.shape.layers
        kinds = {symbols: layer_flops(self.whole, symbols) for symbols in {*layers}}
        return 3 * (sum(kinds[symbols] for symbols in layers) + output_layer(self.whole).flops)


def built(args: argparse.Namespace) -> Build:
    """Returns how Megatron builds the model of ``args``."""
    return as_built(args, megatron_flags.shape(args, megatron_flags.padded(args.vocab_size, args)))


# The kernels of the loss are fused, as in NVIDIA's recipes.
_TRAINED = "--untie-embeddings-and-output-weights --bf16 --cross-entropy-loss-fusion"


def gpt(name: str, layers: int, heads: int, hidden: int, sequence: int = 1024, vocabulary: int = 32_000) -> Model:
    """Returns a GPT in bf16 with an untied output layer, as in the paper, and fused kernels of the loss."""
    return Model(
        name,
        f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads} --seq-length {sequence} "
        f"--max-position-embeddings {sequence} --vocab-size {vocabulary} {_TRAINED}",
    )


_LLAMA = (
    "--group-query-attention --num-query-groups 8 --swiglu --disable-bias-linear --normalization RMSNorm "
    "--position-embedding-type rope --attention-dropout 0 --hidden-dropout 0 --seq-length 8192 "
    f"--max-position-embeddings 8192 --vocab-size 128256 {_TRAINED}"
)
# arXiv 2405.15362, table 3; a vocabulary of 32000 gives the sizes in their names. Meta's Llama 3: arXiv 2407.21783,
# table 3.
MODELS = {
    model.name: model
    for model in (
        gpt("9.6B", 30, 40, 5120),
        gpt("21B", 46, 48, 6144),
        gpt("38.5B", 62, 56, 7168),
        gpt("98.5B", 78, 80, 10240),
        Model(
            "Llama-3-8B",
            f"--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size 14336 {_LLAMA}",
        ),
        Model(
            "Llama-3-70B",
            f"--num-layers 80 --hidden-size 8192 --num-attention-heads 64 --ffn-hidden-size 28672 {_LLAMA}",
        ),
    )
}


def find_model(model: str) -> Model:
    """Finds a model by its name or its file.

    Args:
        model: a name or a path. Flags after it are added, as in ``Llama-3-8B --seq-length 4096``.

    Raises:
        PlanError: if there is none, or its flags describe none.
    """
    name, dashes, more = model.partition(" --")
    if name in MODELS and not more:
        return MODELS[name]
    if name in MODELS:
        flags = MODELS[name].flags
    elif os.path.exists(name):  # Path.exists would raise for a name that is too long
        flags = read_text(Path(name), "model")
    else:
        close = difflib.get_close_matches(name, MODELS, n=1, cutoff=0.4)
        hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(MODELS)}"
        raise PlanError(f"{name!r} is neither a model known by name nor a file: {hint}", "model")
    known = Model(name, f"{flags}\n{dashes}{more}")
    _ = known.args  # raises if the flags describe no model
    return known
