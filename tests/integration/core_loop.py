"""A training loop on megatron-core alone, as its own quick start has it: a GPT model built by hand, no arguments."""

from __future__ import annotations

import gc
import io
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr
from functools import partial
from typing import Any
from weakref import ref

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig, cuda_graphs
from megatron.core.utils import get_attr_wrapped_model, get_model_config

from megatron.schedules.integration.layers.tied import copies as found_copies
from tests.integration.forked_ranks import run_ranks
from tests.integration.results import Call, Done
from tests.loops.ours import install
from tests.support.weights import named_parameters

WORDS, LENGTH, ROWS = 64, 8, 2


def core_loop(
    sizes: dict[str, int], settings: dict[str, Any] | None, calls: Sequence[Call], **options: Any
) -> list[list[Done]]:
    """Runs ``calls`` of the schedule function on ranks of their own.

    Args:
        sizes: for ``parallel_state.initialize_model_parallel``.
        settings: ours; None for a loop without this package.
        calls: the calls.
        options: of the model, see :func:`model_of`. With ``adapters`` only low-rank ones are trained.
    """
    world = math.prod(size for name, size in sizes.items() if not name.startswith("virtual"))
    groups = {name: size for name, size in sizes.items() if name != "data_parallel_size"}
    return run_ranks(world, _loop, groups, settings, calls, options)


def core_loop_refusals(
    sizes: dict[str, int], settings: dict[str, Any], calls: Sequence[Call], **options: Any
) -> list[str]:
    """What each rank prints on standard error when :func:`core_loop` is refused with status 2."""
    groups = {name: size for name, size in sizes.items() if name != "data_parallel_size"}
    return run_ranks(2, _refusal, groups, settings, calls, options)


def _refusal(*job: Any) -> str:
    with redirect_stderr(io.StringIO()) as said:
        try:
            _loop(*job)
        except SystemExit as leaving:
            assert leaving.code == 2
            return said.getvalue()
    raise AssertionError("the loop ran")


def _loop(
    groups: dict[str, int], settings: dict[str, Any] | None, calls: Sequence[Call], options: dict[str, Any]
) -> list[Done]:
    if "prepare" in options:
        options.pop("prepare")()
    if options.pop("adapters", False):
        from tests.integration import low_rank  # imports what 0.17 has elsewhere

        low_rank.put_in_place()
    passes = install(**(settings or {"schedule": None}))
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(**groups)
    model_parallel_cuda_manual_seed(1, te_rng_tracker=options.get("use_te_rng_tracker", False))
    chunks = model_of(**options)
    models = [ref(chunk) for chunk in chunks]
    done = trained(chunks, calls, passes, **options)
    del chunks
    gc.collect()
    # Stock itself keeps models with experts.
    assert "num_moe_experts" in options or not any(model() for model in models), "a model that its loop drops is freed"
    torch.distributed.barrier()  # nobody takes its connections away while another still talks
    return done


class WideModel(GPTModel):
    """A model whose hidden states are twice as wide between stages, as those of hyper-connections are wider."""

    def set_input_tensor(self, input_tensor: Any) -> None:
        if input_tensor is not None and input_tensor[0] is not None:
            input_tensor = [sum(input_tensor[0].chunk(2, dim=-1))]
        super().set_input_tensor(input_tensor)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        output = super().forward(*args, **kwargs)
        return output if self.post_process else torch.cat((output / 4, output * 0.75), dim=-1)


def model_of(
    tied: bool = False,
    wide: bool = False,
    engine: bool = False,
    wrapped: bool = True,
    varied: bool = False,
    layers: int = 8,
    pattern: str | None = None,
    **more: Any,
) -> list[Any]:
    """The chunks of this rank.

    Args:
        tied: whether embedding and output layer share their weights.
        wide: whether hidden states are wider between stages.
        engine: whether linears are Transformer Engine's.
        wrapped: whether data parallelism wraps the model.
        varied: whether samples differ in length.
        layers: decoder layers.
        pattern: layers of a hybrid model; None for a GPT.
        more: other fields of the configuration.
    """
    more = {name: value for name, value in more.items() if name in TransformerConfig.__dataclass_fields__}
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=32,
        num_attention_heads=4,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        virtual_pipeline_model_parallel_size=parallel_state.get_virtual_pipeline_model_parallel_world_size(),
        pipeline_dtype=more.get("params_dtype", torch.float32),
        variable_seq_lengths=varied,
        moe_token_dispatcher_type="alltoall",  # the default refuses samples that differ in length
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        **more,
    )
    config.finalize_model_grads_func = finalize_model_grads if wrapped else None
    number = config.virtual_pipeline_model_parallel_size
    chunks: list[Any] = []
    for at in range(number or 1):
        vp_stage = None if number is None else at
        settings: dict[str, Any] = {
            "vocab_size": WORDS,
            "max_sequence_length": LENGTH,
            "pre_process": parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            "post_process": parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            "position_embedding_type": "rope",
            "vp_stage": vp_stage,
            "share_embeddings_and_output_weights": tied,
        }
        if pattern is not None:
            from megatron.core.models.hybrid import hybrid_layer_specs, hybrid_model  # 0.17 has it elsewhere

            spec = hybrid_layer_specs.hybrid_stack_spec
            chunks.append(hybrid_model.HybridModel(config, spec, hybrid_layer_pattern=pattern, **settings))
            continue
        build = get_gpt_layer_with_transformer_engine_spec if engine else get_gpt_layer_local_spec
        spec = build(num_experts=config.num_moe_experts)
        chunks.append((WideModel if wide else GPTModel)(config, spec, **settings))
    copies = found_copies(chunks)
    assert copies is None or (torch.equal(*copies) and copies[0].any()), "a tied output layer starts as the embedding"
    for name, parameter in named_parameters(chunks):
        if tied and name == "output_layer.weight":
            name = "embedding.word_embeddings.weight"
        with torch.no_grad():
            parameter.normal_(std=0.2, generator=torch.Generator().manual_seed(sum(map(ord, name))))
    if not wrapped:
        return chunks
    how = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    return [DistributedDataParallel(config, how, chunk) for chunk in chunks]


def trained(
    chunks: list[Any],
    calls: Sequence[Call],
    passes: Counter[str],
    varied: bool = False,
    frozen_first: str | None = None,
    passed: str = "causal",
    everywhere: bool = True,
    capture_before: int | None = None,
    **_: Any,
) -> list[Done]:
    """Calls the schedule function as verl does if samples are ``varied``, otherwise as megatron-core's quick start.

    Its forward step has ``passed`` layers a mask, see :func:`forward_step`. Parameters whose names contain
    ``frozen_first`` are trained from the second training call on. Layers are captured as CUDA graphs right before the
    call of number ``capture_before``.
    """
    function = get_forward_backward_func()
    done: list[Done] = []
    for call in calls:
        if len(done) == capture_before:
            _capture(chunks, call.microbatches)
        for name, parameter in named_parameters(chunks):
            if frozen_first is not None and frozen_first in name:
                parameter.requires_grad_(not all(each.forward_only for each in calls[: len(done)]))
        for parameter in (each for chunk in chunks for each in chunk.parameters()):
            parameter.grad = None
        for chunk in chunks:
            if isinstance(chunk, DistributedDataParallel):
                chunk.zero_grad_buffer()
        iterators: Any = [samples(call, varied) for _ in chunks]
        results = function(
            forward_step_func=partial(forward_step, passed=passed, everywhere=everywhere),
            data_iterator=iterators if len(chunks) > 1 else iterators[0],
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=call.microbatches,
            seq_length=1 if varied else LENGTH,
            micro_batch_size=1 if varied else ROWS,
            forward_only=call.forward_only,
        )
        named = ((name, getattr(each, "main_grad", each.grad)) for name, each in named_parameters(chunks))
        gradients = {f"{name} {_replica()}": gradient.clone() for name, gradient in named if gradient is not None}
        done.append(Done(results, gradients, dict(passes)))
        passes.clear()
    return done


def _capture(chunks: list[Any], microbatches: int) -> None:
    replicas = parallel_state.get_data_parallel_world_size()
    init_num_microbatches_calculator(0, None, microbatches * ROWS * replicas, ROWS, replicas)
    cuda_graphs.TECudaGraphHelper(chunks, get_model_config(chunks[0]), LENGTH, ROWS).create_cudagraphs()


def _replica() -> tuple[int, int]:
    """Data- and tensor-parallel rank."""
    return parallel_state.get_data_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()


def samples(call: Call, varied: bool) -> Iterator[torch.Tensor]:
    """Yields the tokens of each microbatch."""
    generator = torch.Generator().manual_seed(call.seed)
    for number in range(call.microbatches):
        length = 3 + (number + call.seed) % 5 if varied else LENGTH
        yield torch.randint(WORDS, (ROWS, length), generator=generator)


def forward_step(
    data_iterator: Iterator[torch.Tensor], model: Any, passed: str = "causal", everywhere: bool = True
) -> tuple[torch.Tensor, Any]:
    """Forward of a chunk, and what makes its loss.

    Args:
        data_iterator: the tokens.
        model: the chunk.
        passed: what its layers get: a "causal" mask, one that keeps "documents" apart, or one that marks "padding" too.
        everywhere: whether all stages get it, or only the first and the last.
    """
    tokens = next(data_iterator)
    length = tokens.shape[1]
    mask: torch.Tensor | None = torch.ones(1, 1, length, length).triu(1).bool()
    more = {"padding_mask": tokens % 3 == 0} if passed == "padding" else {}
    if passed == "documents":
        numbers = (tokens % 3 == 0).cumsum(1)
        mask = mask | (numbers[:, None, :, None] != numbers[:, None, None, :])
    if not everywhere and not any(get_attr_wrapped_model(model, end) for end in ("pre_process", "post_process")):
        mask, more = None, {}
    positions = torch.arange(length).expand(ROWS, -1)
    return model(tokens, positions, mask, labels=tokens.roll(-1, 1), **more), partial(loss, tokens)


def loss(tokens: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    """Loss, and results as nested as those of reinforcement learning."""
    mean = losses.mean()
    results = {
        "loss": mean.detach().item(),
        "metrics": {"tokens": tokens.numel(), "names": ["a", ("b", None)], "tuple": Call(1, seed=tokens.shape[1])},
        "model_output": {"high": losses[0, :3] > mean, "half": losses.detach().bfloat16(), "words": tokens[0]},
        "mean": mean.detach().clone(),
        "rows": torch.nested.as_nested_tensor([losses.detach()[0, :2], losses.detach()[1]], layout=torch.jagged),
    }
    return mean, results
