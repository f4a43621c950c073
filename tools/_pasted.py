"""What sets a setting: Megatron's flags, or lines of Python for a recipe of Megatron-Bridge."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.schedules.job.stage_layers import written
from tools._iteration import Estimate, memory_limit
from tools._setting import Setting


def flags(found: Estimate) -> str:
    """Returns flags for ``pretrain_gpt.py``, after the model's own."""
    setting = found.setting
    length = setting.model.sequence
    words = [
        f"--tensor-model-parallel-size {setting.tensor}",
        f"--pipeline-model-parallel-size {setting.pipeline}",
        *([f"--context-parallel-size {setting.context}"] if setting.context > 1 else []),
        *([f"--expert-model-parallel-size {setting.expert}"] if setting.expert > 1 else []),
        f"--seq-length {length} --max-position-embeddings {setting.model.args.max_position_embeddings or length}",
        f"--micro-batch-size {setting.micro_batch} --global-batch-size {setting.global_batch}",
        "--use-distributed-optimizer",
        *(["--sequence-parallel"] if setting.tensor > 1 else []),
        *_recompute(setting),
    ]
    return " ".join([*words, *(_of_stock(found) if setting.method.is_stock else _of_ours(found))])


def _recompute(setting: Setting) -> Iterator[str]:
    again = setting.recompute
    if again.granularity:
        yield f"--recompute-granularity {again.granularity}"
    if again.method:
        yield f"--recompute-method {again.method} --recompute-num-layers {again.layers or 1}"
    if again.modules:
        yield f"--recompute-modules {' '.join(again.modules)}"


def _of_stock(found: Estimate) -> Iterator[str]:
    """Yields stock's flags of the layers, which also say how many chunks a rank has."""
    if found.setting.pipeline > 1:
        layers = found.setting.spec.layers
        flag = "--pipeline-model-parallel-layout" if layers.pattern is None else "--hybrid-layer-pattern"
        yield f'{flag} "{written(layers, found.outcome.layers)}"'


def _of_ours(found: Estimate) -> Iterator[str]:
    """Yields the flags of this package."""
    setting = found.setting
    method, offload = setting.method, setting.method.may_offload
    yield f"--pipeline-schedule {setting.choice.text}"
    if method.shared:
        yield "--pipeline-vocabulary-parallel"
    yield f"--pipeline-layers {','.join(map(str, found.outcome.layers))}"
    if method.is_searched:
        yield f"--pipeline-memory-limit {memory_limit(setting):.3f}"
    if method.saves_memory:
        rate = f"={setting.device.host_link / 1e9:g}" if offload else ""
        how = "recompute" if not offload else "both" if method.may_recompute else "offload"
        yield f"--pipeline-save-memory {how}{rate}"
    times = *setting.costs.layers.passes, setting.costs.link.latency
    yield f"--pipeline-costs {','.join(f'{1e3 * time:.5g}' for time in times)}"


def overrides(found: Estimate, left_out: frozenset[str] = frozenset()) -> str:
    """Returns lines of Python for a recipe of Megatron-Bridge, whose configuration is ``cfg``.

    Args:
        found: the setting.
        left_out: Megatron's arguments that a schedule of ours does not work with.
    """
    setting, layers = found.setting, found.outcome.layers
    again, stock = setting.recompute, setting.method.is_stock
    lines = {
        "tensor_model_parallel_size": setting.tensor,
        "sequence_parallel": setting.tensor > 1,
        "context_parallel_size": setting.context,
        "expert_model_parallel_size": setting.expert,
        "pipeline_model_parallel_size": setting.pipeline,
        "recompute_granularity": again.granularity,
        "recompute_method": again.method,
        "recompute_num_layers": again.layers,
        "recompute_modules": list(again.modules) or None,
        "account_for_embedding_in_pipeline_split": False,
        "account_for_loss_in_pipeline_split": False,
    }
    chunks = setting.method.chunks if setting.pipeline > 1 else 1
    lines["virtual_pipeline_model_parallel_size"] = chunks if chunks > 1 else None
    lines["pipeline_model_parallel_layout"] = (
        written(setting.spec.layers, layers) if stock and setting.pipeline > 1 else None
    )
    text = [f"cfg.model.{name} = {value!r}" for name, value in lines.items()]
    text.append(f"cfg.train.micro_batch_size = {setting.micro_batch}")
    if not stock:
        text += [f"# leave out {name}" for name in sorted(left_out)]
        limit = f', memory_limit="{memory_limit(setting):.3f}"' if setting.method.is_searched else ""
        placed = ",".join(map(str, layers))
        text.append(f'megatron.schedules.install(schedule="{setting.choice.text}", layers="{placed}"{limit})')
    return "\n".join(text)
