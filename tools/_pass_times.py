"""The parts of a model on one device, without a pipeline: built by Megatron from its own flags, and timed pass by pass.

Importing this imports Megatron, on its CPU stand-in where there is no GPU; one model to a process.
"""

from __future__ import annotations

import copy
import ctypes
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import count, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.schedules.integration.cpu import standin

if standin.needed():
    standin.enable()

from megatron.core.datasets import utils as dataset_utils
from megatron.core.enums import ModelType
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import get_model_config
from megatron.training.argument_utils import (
    gpt_config_from_args,
    hybrid_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import parse_and_validate_args
from megatron.training.initialize import initialize_megatron
from megatron.training.models.dist_utils import unimodal_build_distributed_models

from megatron.schedules.integration import gpt
from megatron.schedules.integration.gpu_libraries import use_compiled_helpers
from megatron.schedules.integration.linears.local import split_linears
from megatron.schedules.integration.linears.transformer_engine import split_te_linears
from megatron.schedules.integration.model_binding import Deferred, capture_state, recompute_layers
from megatron.schedules.integration.model_stages import MegatronStages
from megatron.schedules.integration.schedule_call import ScheduleCall
from megatron.schedules.programs.program import Program
from megatron.schedules.runtime.activation_meter import ActivationMeter
from megatron.schedules.runtime.recompute import Recomputes
from megatron.schedules.runtime.weight_gradients import WeightGradients
from megatron.schedules.schedule.placement import Placement

ON_CPU = standin.needed()

# The first stages of a pipeline of one rank; a hybrid model has more of layers.
EMBEDDING, LAYERS = 0, 1
# GPT-2's vocabulary, where the flags name none; tokens are drawn, not read.
_DEFAULTS = {"tokenizer_type": "NullTokenizer", "vocab_size": 50257}

# What Megatron needs to be told where there is neither Apex nor Transformer Engine, and where there is no GPU.
LOCAL_FLAGS = ["--transformer-impl", "local", "--no-gradient-accumulation-fusion"]
LOCAL_FLAGS += ["--no-masked-softmax-fusion", "--no-persist-layer-norm"]
WITHOUT_GPU_FLAGS = ["--distributed-backend", "gloo", "--no-bias-dropout-fusion"]
ON_CPU_FLAGS = [*LOCAL_FLAGS, *WITHOUT_GPU_FLAGS]


def accumulates_fused() -> bool:
    """Returns whether Apex's kernel that adds weight gradients to Megatron's buffers is here."""
    return find_spec("fused_weight_gradient_mlp_cuda") is not None


def gpu_flags(*, te: bool) -> list[str]:
    """Returns what Megatron needs to be told on a GPU for local layers, or with ``te`` for Transformer Engine's."""
    if not te:
        return LOCAL_FLAGS
    return [] if accumulates_fused() else ["--no-gradient-accumulation-fusion"]


class Model(NamedTuple):
    """What is measured.

    Args:
        args: Megatron's arguments.
        chunks: the embedding, chunks of decoder layers only, and the output layer with the loss, wrapped as for
            training.
        batches: what each of them reads.
    """

    args: Any
    chunks: list[torch.nn.Module]
    batches: list[dict[str, Tensor | None]]

    @property
    def output(self) -> int:
        """The stage of the output layer, the last one."""
        return len(self.chunks) - 1


class Seconds(NamedTuple):
    """Seconds of one forward and its backward; ``weight_grad`` is 0 where the backward was not split."""

    forward: float
    input_grad: float
    weight_grad: float

    @property
    def backward(self) -> float:
        return self.input_grad + self.weight_grad


class Recomputed(NamedTuple):
    """Seconds of a recomputed forward, and the bytes kept for it."""

    seconds: float
    input_bytes: int


class Held(NamedTuple):
    """Bytes of activations of one microbatch, from F to I and from I to W."""

    after_forward: int
    after_input_grad: int


def build(flags: Sequence[str], patterns: Sequence[str] = ()) -> Model:
    """Builds the model of Megatron's ``flags``: a GPT with all ``--num-layers`` in one chunk, or a hybrid model.

    Processes must have torchrun's environment, and be as many as tensor and context parallelism ask for.

    Args:
        flags: Megatron's.
        patterns: symbols of the layers of each chunk of a hybrid model.
    """
    if ON_CPU:
        _keep_memory()
    # The check for NaN is part of stock's loop, and refuses to work outside it.
    sys.argv = [sys.argv[0], *flags, "--no-check-for-nan-in-loss-and-grad"]
    args = parse_and_validate_args(args_defaults=_DEFAULTS)
    config = hybrid_config_from_args(args) if patterns else gpt_config_from_args(args)
    # In a pipeline both ends have their own weights, or their own copy.
    config.share_embeddings_and_output_weights = False
    training = pretrain_cfg_container_from_args(args, config)
    training.ddp.overlap_grad_reduce = False
    use_compiled_helpers(dataset_utils)
    initialize_megatron()
    ends = copy.deepcopy(config)
    if patterns:
        ends.hybrid_layer_pattern = ""
    else:
        ends.transformer.num_layers = 0
    groups = ProcessGroupCollection.use_mpu_process_groups()

    def build_chunk(config: Any, first: bool, last: bool) -> torch.nn.Module:
        builder = config.get_builder_cls()(config)
        found: list[torch.nn.Module] = unimodal_build_distributed_models(
            lambda groups, **_: builder.build_model(groups, pre_process=first, post_process=last),
            config.transformer,
            groups,
            training.ddp,
            mixed_precision_wrapper=Float16Module if args.fp16 or args.bf16 else None,
            model_type=ModelType.encoder_or_decoder,
        )
        return found[0]

    between = [replace(config, hybrid_layer_pattern=pattern) for pattern in patterns] or [config]
    layers = [build_chunk(each, False, False) for each in between]
    chunks = [build_chunk(ends, True, False), *layers, build_chunk(ends, False, True)]
    return Model(args, chunks, _batches(args, len(layers)))


def _keep_memory() -> None:
    """Keeps freed memory in this process, as a GPU's allocator does.

    The C library's gives it back and has it faulted in again, in the midst of whichever pass comes next.
    """
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(-4, 0)  # M_MMAP_MAX: nothing is mapped by itself
        library.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: nothing is given back


def time_passes(model: Model, stage: int, *, split: bool = True) -> Iterator[Seconds]:
    """Times the passes of ``stage`` repeatedly, without end; without ``split`` the backward is stock's.

    One repetition each time one is asked for. On a GPU its own clock is read, at the end of the repetition.
    """
    stages, store = _stages(model, None)
    activation, gradient = _ends(model, stage, stages)
    with store.keeping_graphs():  # as in a job
        for microbatch in count(1):
            _bind(model, stage, store)
            times = [_now()]
            stages.forward(stage, microbatch, activation, split=split, recompute=False)
            times.append(_now())
            with _bare_torch():
                if split:
                    stages.backward_input(stage, microbatch, gradient)
                    times.append(_now())
                    stages.backward_weight(stage, microbatch)
                else:
                    stages.backward(stage, microbatch, gradient)
            times.append(_now())
            if activation is not None:
                activation.grad = None
            yield Seconds(*_differences(times), *([] if split else [0.0]))


def time_recompute(model: Model, stage: int) -> Iterator[Recomputed]:
    """Times R of all layers of ``stage`` repeatedly, without end; to be called once for a stage, last."""
    recomputes = Recomputes(capture_state)
    recompute_layers(model.chunks[stage], None, recomputes)
    meter = _meter(model)
    plain, _ = _stages(model, None)
    activation, gradient = _ends(model, stage, plain)
    metered, others = (_stages(model, each, recomputes) for each in (meter, None))
    left = 0
    with others[1].keeping_graphs():  # as in a job
        for microbatch in count(1):
            stages, store = metered if microbatch == 1 else others
            _bind(model, stage, store)
            before = meter.current
            stages.forward(stage, microbatch, activation, split=True, recompute=True)
            if microbatch == 1:
                left = meter.current - before
            times = [_now()]
            stages.recompute_forward(stage, microbatch)
            times.append(_now())
            stages.backward_input(stage, microbatch, gradient)
            stages.backward_weight(stage, microbatch)
            if activation is not None:
                activation.grad = None
            yield Recomputed(_differences(times)[0], left)


def held(model: Model, stage: int) -> Held:
    """Returns the activation memory of one microbatch of ``stage``, by the runtime's meter."""
    meter = _meter(model)
    stages, store = _stages(model, meter)
    activation, gradient = _ends(model, stage, stages)
    _bind(model, stage, store)
    before = meter.current
    stages.forward(stage, 1, activation, split=True, recompute=False)
    after_forward = meter.current
    stages.backward_input(stage, 1, gradient)
    after_input = meter.current
    stages.backward_weight(stage, 1)
    return Held(after_forward - before, after_input - before)


def _meter(model: Model) -> ActivationMeter:
    return ActivationMeter(parameter for chunk in model.chunks for parameter in chunk.parameters())


def _stages(
    model: Model, meter: ActivationMeter | None, recomputes: Recomputes | None = None
) -> tuple[MegatronStages, WeightGradients]:
    """Returns the model as the runtime's stages."""
    store = WeightGradients(meter)
    call = ScheduleCall(_forward_step, model.batches, 1, False, None, model.args.context_parallel_size)  # type: ignore[arg-type]
    config = get_model_config(model.chunks[0])
    program = Program(0, (), Placement("interleaved", (0,) * len(model.chunks)), 1)
    stages = MegatronStages(
        program, model.chunks, config, call, Deferred(store, recomputes), lambda stage: nullcontext(), meter
    )
    return stages, store


def _bind(model: Model, stage: int, store: WeightGradients) -> None:
    split_linears(model.chunks[stage], store)
    split_te_linears(model.chunks[stage], store)


def _ends(model: Model, stage: int, stages: MegatronStages) -> tuple[Tensor | None, Tensor | None]:
    """Returns an input of ``stage`` and a gradient of its output, as messages of the pipeline bring them."""
    message = stages.forward(EMBEDDING, 0, None, split=False, recompute=False)
    assert message is not None
    stages.backward(EMBEDDING, 0, torch.randn_like(message))
    activation = None if stage == EMBEDDING else torch.randn_like(message.detach())
    return activation, None if stage == model.output else torch.randn_like(message.detach())


def _batches(args: Any, between: int) -> list[dict[str, Tensor | None]]:
    """Returns random tokens for the embedding, nothing for ``between`` chunks, and random labels for the output."""
    shape = args.micro_batch_size, args.seq_length // args.context_parallel_size
    numbers = torch.randint(args.vocab_size or args.padded_vocab_size, shape, device="cuda")
    positions = torch.arange(shape[1], device="cuda").expand(shape)
    nothing: dict[str, Tensor | None] = dict.fromkeys(("input_ids", "position_ids", "labels"))
    counts = torch.ones(shape, device="cuda")
    last: dict[str, Tensor | None] = {"labels": numbers, "mask": counts}
    return [nothing | {"input_ids": numbers, "position_ids": positions}, *[nothing] * between, last]


def _forward_step(batch: Any, chunk: torch.nn.Module) -> tuple[Tensor, Callable[[Tensor], Any]]:
    output = chunk(batch.get("input_ids"), batch.get("position_ids"), None, labels=batch["labels"])
    return output, partial(gpt.loss, batch.get("mask"))


def _bare_torch() -> AbstractContextManager[Any]:
    """Disables the stand-in's function mode, which would take most of the time of a small pass."""
    return torch._C.DisableTorchFunction() if ON_CPU else nullcontext()


def _now() -> Any:
    """Returns the time, on a GPU once it has done what it was given so far."""
    if ON_CPU:
        return time.perf_counter()
    moment = torch.cuda.Event(enable_timing=True)
    moment.record()
    return moment


def _differences(moments: Sequence[Any]) -> list[float]:
    if ON_CPU:
        return [after - before for before, after in pairwise(moments)]
    torch.cuda.synchronize()
    return [before.elapsed_time(after) / 1e3 for before, after in pairwise(moments)]
