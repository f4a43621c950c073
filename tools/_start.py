"""Where a search starts: a model by name, a script, or a recipe of Megatron-Bridge, with the user's own setting."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron.schedules.estimate.build_flags import stand_in, stock_recompute
from megatron.schedules.estimate.devices import SHORT, Device
from megatron.schedules.estimate.layer_pattern import hybrid_layers
from megatron.schedules.estimate.megatron_flags import FLAGS, NAMED_OTHERWISE, attribute, declare, script_words
from megatron.schedules.estimate.models import Model, find_model
from megatron.schedules.job.spec import StockLayers
from megatron.schedules.utils.errors import PlanError
from tools._methods import INTERLEAVED, ONE_F_ONE_B
from tools._parsing import Parser
from tools._question import Question
from tools._setting import Setting

# Flags of a script that describe its setting, beside those of the model.
_OWN: dict[str, Any] = {
    "--cuda-graph-impl": (str, "none"),
    "--cuda-graph-modules": (list, None),
    "--cuda-graph-scope": (list, None),
    "--decoder-first-pipeline-num-layers": (int, None),
    "--decoder-last-pipeline-num-layers": (int, None),
    "--num-layers-per-virtual-pipeline-stage": (int, None),
    "--num-virtual-stages-per-pipeline-rank": (int, None),
    "--overlap-grad-reduce": (None, False),
    "--pipeline-model-parallel-layout": (str, None),
    "--pipeline-model-parallel-size": (int, None),
}
_READ = [NAMED_OTHERWISE.get(flag, attribute(flag)) for flag in FLAGS] + [attribute(flag) for flag in _OWN]


@dataclass(frozen=True, eq=False)
class Given(Model):
    """A model whose arguments are known.

    Args:
        given: its arguments.
    """

    given: argparse.Namespace = field(default_factory=argparse.Namespace)

    @cached_property
    def args(self) -> argparse.Namespace:
        """Its arguments, for one pipeline rank."""
        return self.given


@dataclass(frozen=True)
class Start:
    """What is searched.

    Args:
        question: the training run.
        left_out: Megatron's arguments that our schedules do not work with, and why.
        is_bridge: true for a recipe of Megatron-Bridge, whose settings are Python.
        unknown: parts of the model that the estimate leaves out.
    """

    question: Question
    left_out: Mapping[str, str] = field(default_factory=dict)
    is_bridge: bool = False
    unknown: tuple[str, ...] = ()


def of_model(text: str, device: Device, gpus: int, batch: int, tokens: int | None = None) -> Start:
    """Returns the search for a model by name, or for a script, whose parallel sizes are the user's own setting.

    Args:
        text: the model, or a file of Megatron's flags.
        device: the GPU.
        gpus: number of GPUs.
        batch: samples of an iteration.
        tokens: tokens of a sample; None for the model's.

    Raises:
        PlanError: there is no such model.
    """
    model = find_model(text) if tokens is None else find_model(text).of_length(tokens)
    parser = Parser(allow_abbrev=False, add_help=False)
    declare(parser, _OWN)
    own, _ = parser.parse_known_args(script_words(model.flags))
    args = model.trained(**vars(own))
    chunks = own.num_virtual_stages_per_pipeline_rank
    if each := own.num_layers_per_virtual_pipeline_stage:
        chunks = args.num_layers // ((own.pipeline_model_parallel_size or 1) * each)
    args.pipeline_model_parallel_size = 1
    known = Given(model.name, model.flags, args)
    question = Question(known, device, gpus, batch)
    if own.pipeline_model_parallel_size is not None:
        hybrid = hybrid_layers(args)
        stages = StockLayers(
            args.num_layers,
            own.decoder_first_pipeline_num_layers,
            own.decoder_last_pipeline_num_layers,
            own.pipeline_model_parallel_layout,
            stand_in(args),
            args.mtp_num_layers or 0,
            hybrid and hybrid.pattern,
        )
        question = _with_own(question, own.pipeline_model_parallel_size, chunks or 1, stages)
    return Start(question)


def of_recipe(
    name: str, folder: Path, device: Device | None = None, gpus: int | None = None, batch: int | None = None
) -> Start:
    """Returns the search for a recipe of Megatron-Bridge.

    Args:
        name: the recipe.
        folder: unpacked wheel of megatron-bridge.
        device, gpus, batch: other than the recipe's; None for its own.

    Raises:
        PlanError: there is no such recipe, or no estimate of it.
    """
    # They import Megatron.
    bridge: Any = importlib.import_module("benchmarks.recipes.bridge")
    found = bridge.recipes(folder)
    if name not in found:
        raise PlanError(f"{folder} has no performance recipe {name}", "recipe")
    return of_config(name, bridge.called(found[name]), device, gpus, batch)


def of_config(
    name: str, config: Any, device: Device | None = None, gpus: int | None = None, batch: int | None = None
) -> Start:
    """Returns the search for the ``ConfigContainer`` of a recipe. Arguments and errors as in :func:`of_recipe`."""
    bridge: Any = importlib.import_module("benchmarks.recipes.bridge")
    arguments: Any = importlib.import_module("benchmarks.recipes.arguments")
    rules: Any = importlib.import_module("benchmarks.recipes.answer")
    own_gpus, own_device = bridge.gpus_of(name)
    args = arguments.of_container(config, own_gpus)
    for argument, what in rules.NO_FIGURES.items():
        if getattr(args, argument, None):
            raise PlanError(f"{name}: there is no estimate of {what}", "recipe")
    unknown = tuple(said for argument, said in rules.UNKNOWN.items() if getattr(args, argument, None))
    pipeline, stages, chunks = args.pipeline_model_parallel_size, None, 1
    left_out: Mapping[str, str] = {}
    if pipeline > 1:
        spec, chunks, left_out = rules.stock_job(args, SHORT[own_device].memory / 2**30)
        stages = spec.layers
    question = Question(
        Given(name, "", _plain(args)),
        device or SHORT[own_device],
        gpus or own_gpus,
        batch or args.global_batch_size,
        lost=frozenset(left_out),
    )
    return Start(_with_own(question, pipeline, chunks, stages), left_out, is_bridge=True, unknown=unknown)


def _plain(args: argparse.Namespace) -> argparse.Namespace:
    """Returns the arguments that estimates read, as plain values that travel between processes."""
    plain = argparse.Namespace(**{name: getattr(args, name, None) for name in _READ})
    for name in ("cuda_graph_modules", "cuda_graph_scope"):
        listed = getattr(args, name, None) or ()
        names = [listed] if isinstance(listed, str) else [str(getattr(each, "name", each)) for each in listed]
        setattr(plain, name, names)
    backend = getattr(args, "attention_backend", None)
    plain.attention_backend = SimpleNamespace(name=getattr(backend, "name", "auto"))
    plain.vocab_size = args.padded_vocab_size or args.vocab_size
    plain.micro_batch_size = args.micro_batch_size or 1
    plain.pipeline_model_parallel_size, plain.world_size = 1, args.world_size
    return plain


def _with_own(question: Question, pipeline: int, chunks: int, stages: StockLayers | None) -> Question:
    """Returns the question with the user's own setting, if it uses all GPUs."""
    args = question.model.args
    tensor, context = args.tensor_model_parallel_size, args.context_parallel_size
    data, rest = divmod(question.gpus, tensor * context * pipeline)
    method = ONE_F_ONE_B if chunks == 1 else INTERLEAVED._replace(chunks=chunks)
    own = Setting(
        method,
        question.model,
        question.device,
        data,
        tensor,
        pipeline,
        args.micro_batch_size,
        question.global_batch,
        context=context,
        expert=args.expert_model_parallel_size,
        recompute=stock_recompute(args),
        stages=stages if pipeline > 1 else None,
    )
    runs = data and not rest and question.global_batch % (data * args.micro_batch_size) == 0
    return replace(question, own=own) if runs else question
