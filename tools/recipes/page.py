"""Answers for recipes: as text, and as docs/recipes.md."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median

from megatron.schedules.report.table import markdown
from tools.recipes.answer import Answer, Planned

_FAMILIES = {
    "deepseek_v3": "DeepSeek-V3",
    "deepseek_v4": "DeepSeek-V4",
    "glm": "GLM-5",
    "gpt_oss": "GPT-OSS",
    "kimi": "Kimi K2",
    "llama3_": "Llama 3",
    "llama31_": "Llama 3.1",
    "nemotron": "Nemotron",
    "qwen3_235b": "Qwen3",
    "qwen3_30b": "Qwen3",
    "qwen3_next": "Qwen3-Next",
    "qwen3_vl": "Qwen3-VL",
    "qwen35_vl": "Qwen3.5-VL",
}
# Recipes of Megatron-Bridge 0.6.2 with pipeline parallelism.
_ALL = 207
# What is left out, in a few words.
_SHORT = {
    "cuda_graph_impl": "CUDA graphs",
    "delay_wgrad_compute": "expert overlap",
    "fine_grained_activation_offloading": "offloading",
    "moe_expert_rank_capacity_factor": "paged stash",
    "moe_paged_stash": "paged stash",
    "overlap_moe_expert_parallel_comm": "expert overlap",
    "use_transformer_engine_op_fuser": "op fuser",
}
_HEADS = (
    ("recipe", ""),
    ("GPUs", ""),
    ("sizes", ""),
    ("n", ""),
    ("linears", ""),
    ("stock:", "bubble"),
    ("GiB", ""),
    ("ours", ""),
    ("bubble", ""),
    ("GiB", ""),
    ("time", ""),
    ("accepted", ""),
)
_HALF_HEADS = (
    ("recipe", ""),
    ("recomputes", ""),
    ("GPU:", "GiB"),
    ("stock:", "GiB"),
    ("stock without recompute:", "GiB"),
    ("v-half without recompute:", "GiB"),
    ("time", ""),
)


def as_text(answer: Answer) -> str:
    """Returns a few lines."""
    lines = [
        f"{answer.name}: {answer.gpus} {answer.device}, {answer.sizes}, {answer.microbatches} microbatches, "
        f"{answer.precision}{f', recomputes {answer.recompute}' if answer.recompute else ''}"
    ]
    for name, planned in (
        ("stock", answer.stock),
        ("ours", answer.ours),
        ("stock without recompute", answer.without),
        ("half the activation memory, without recompute", answer.half),
    ):
        if planned is not None:
            lines.append(
                f"  {name}: {planned.schedule}, planned bubble {100 * planned.bubble:.1f} %, {planned.gib:.1f} GiB of "
                f"{answer.gib:g} on the fullest rank, {planned.activations:.1f} of them activations, "
                f"iteration time {planned.time:.3f} of stock's"
            )
    lines += [f"  not counted: {what}" for what in answer.unknown]
    lines += [f"  leave out {argument}: {why}" for argument, why in answer.left_out.items()]
    lines.append(
        f"  refused: {answer.refused}" if answer.refused else f"  accepted{' without these' * bool(answer.left_out)}"
    )
    return "\n".join(lines)


def as_page(answers: Sequence[Answer]) -> str:
    """Returns docs/recipes.md."""
    families: dict[str, list[Answer]] = {}
    for each in sorted(answers, key=lambda each: each.name):
        family = next((title for start, title in _FAMILIES.items() if each.name.startswith(start)), "Others")
        families.setdefault(family, []).append(each)
    tables = (f"### {family}\n\n{markdown(_HEADS, [_row(each) for each in rows])}" for family, rows in families.items())
    return _HEAD + "\n".join(
        [
            _counts(answers),
            _GUIDE,
            "## Every recipe\n",
            _LEGEND,
            *tables,
            "## What has to be left out\n",
            _left_out(answers),
            "## Recipes that recompute\n",
            _HALF,
            markdown(_HALF_HEADS, [_half(each) for each in _recomputing(answers)]),
            _NOT_COUNTED,
        ]
    )


def _counts(answers: Sequence[Answer]) -> str:
    accepted = [each for each in answers if each.is_accepted]
    without = [each for each in answers if each.left_out and not each.refused]
    refused = [each for each in answers if each.refused]
    lines = [
        "| recipes | |",
        "|---|---|",
        f"| {len(answers)} | of {_ALL} with pipeline parallelism are on this page |",
        f"| **{len(accepted)}** | are accepted as they are |",
        f"| **{len(without)}** | are accepted without [settings](#what-has-to-be-left-out) that their rows name |",
    ]
    reasons = Counter(each.refused for each in refused)
    lines += [f"| **{count}** | are refused: *{_reason(why)}* |" for why, count in reasons.most_common()]
    times = [each.ours.time for each in answers if each.ours is not None and not each.refused]
    shorter, gain = sum(time < 1 for time in times), 100 * (1 - median(times or [1.0]))
    stock, half = _fitting(answers, "without"), _fitting(answers, "half")
    lines += [
        "",
        f"By plan our iteration is shorter than stock's in {shorter} of {len(times)} recipes, in the median by",
        f"{gain:.0f} %. {len(_recomputing(answers))} recipes recompute. Without recompute {stock} of them fit their",
        f"GPU under stock's schedule, and {half} under `v-half` ([table](#recipes-that-recompute)).",
    ]
    return "\n".join(lines) + "\n"


def _recomputing(answers: Sequence[Answer]) -> list[Answer]:
    return sorted((each for each in answers if each.half is not None and not each.refused), key=lambda each: each.name)


def _fitting(answers: Sequence[Answer], name: str) -> int:
    return sum(getattr(each, name).gib <= each.gib for each in _recomputing(answers))


def _reason(why: str) -> str:
    return re.sub(r"(--[a-z0-9-]+)", r"`\1`", why)


def _left_out(answers: Iterable[Answer]) -> str:
    arguments: dict[str, dict[str, str]] = {}
    recipes: Counter[str] = Counter()
    alone: Counter[str] = Counter()
    for each in answers:
        words = _words(each)
        recipes.update(words)
        alone.update(words if len(words) == 1 else ())
        for argument, why in each.left_out.items():
            arguments.setdefault(_SHORT.get(argument, argument), {})[argument] = why.partition(": ")[2]
    rows = [
        [
            word,
            ", ".join(f"`{argument}`" for argument in arguments[word]),
            str(count),
            str(alone[word]),
            next(iter(arguments[word].values())).partition(";")[0],
        ]
        for word, count in recipes.most_common()
    ]
    return markdown((("what", ""), ("arguments", ""), ("recipes", ""), ("of them only this", ""), ("why", "")), rows)


def _words(each: Answer) -> list[str]:
    return list(dict.fromkeys(_SHORT.get(argument, argument) for argument in each.left_out))


def _row(each: Answer) -> list[str]:
    mark = "≈" if each.unknown else ""
    said = f"without {', '.join(_words(each))}" if each.left_out else "yes"
    if found := re.search(r"--[a-z0-9-]+", each.refused):
        said = f"no: `{found[0]}`"
    ours = None if each.refused else each.ours
    return [
        each.name.removesuffix("_config"),
        f"{each.gpus} {each.device}",
        each.sizes,
        str(each.microbatches),
        each.precision,
        *_cells(each.stock, each.gib, mark),
        "" if ours is None else ours.schedule,
        *_cells(ours, each.gib, mark),
        "" if ours is None else f"{ours.time:.2f}",
        said,
    ]


def _cells(planned: Planned | None, gib: float, mark: str) -> tuple[str, str]:
    if planned is None:
        return "", ""
    return f"{100 * planned.bubble:.1f} %", mark + _much(planned, gib)


def _half(each: Answer) -> list[str]:
    assert each.stock is not None and each.without is not None and each.half is not None, "it recomputes"
    return [
        each.name.removesuffix("_config"),
        each.recompute,
        f"{each.gib:g}",
        *(_much(planned, each.gib) for planned in (each.stock, each.without, each.half)),
        f"{each.half.time:.2f}",
    ]


def _much(planned: Planned, gib: float) -> str:
    much = f"{planned.gib:.0f}"
    return f"**{much}**" if planned.gib > gib else much


_HEAD = """# NVIDIA's recipes

Megatron-Bridge 0.6.2 has performance recipes for H100, B200, B300, GB200, GB300 and VR200. For each recipe with
pipeline parallelism this page says whether our schedules accept it, which settings have to be left out, and which
bubble and memory are planned, next to stock's schedule. `tools/recipes` writes this page. Nothing on it was measured on
a GPU.

"""
_GUIDE = """To train a recipe of Megatron-Bridge with a schedule, put two lines at the top of the script, and set two
chunks in the recipe ([other loops](loops.md)):

```python
import megatron.schedules
megatron.schedules.install(schedule="v-half")  # or v-zb, as the recipe's row says
cfg.model.virtual_pipeline_model_parallel_size = 2
```

If the layers do not divide evenly over the stages, give the number of each stage in model order, such as
`layers="8,8,8,8,8,8,8,5"`: the first and the last one have the embedding and the output layer. A script of Megatron-LM
takes `--pipeline-schedule v-half --pipeline-layers auto` instead. Layers of stages that the recipe sets
(`pipeline_model_parallel_layout`, `account_for_..._in_pipeline_split`) are left out. The figures of this
page are without a search for layers. The schedule `auto` searches for minutes, also for layers and recompute
([which schedule](which-schedule.md)).

A schedule switches off some settings by itself: the bulk overlaps of `tp_comm_overlap`
([tensor parallel](gpu.md#what-overlaps-with-computing)) and `defer_embedding_wgrad_compute`. These recipes count as
accepted.

## Your own recipe

```sh
python -m tools.recipes train.sh --gpus 64 --device H100          # a script with Megatron-LM's flags
pip download --no-deps megatron-bridge==0.6.2 && unzip megatron_bridge-*.whl -d bridge
pip install "transformers>=5.8,<=5.12.1" accelerate einops hydra-core omegaconf peft
python -m tools.recipes --bridge bridge llama3_70b_pretrain_64gpu_h100_bf16_config
```

The tool calls the recipe and reads the `ConfigContainer` that it returns. No GPU is needed. What Bridge imports and is
not installed, such as Transformer Engine, is replaced by empty modules. Models of the recipes on this page are not
downloaded from Hugging Face.
"""
_LEGEND = """- *Sizes*: T tensor, C context, E expert and P pipeline parallel ranks, V chunks of a rank under stock's
  interleaved schedule; *n*: microbatches
- *Stock*: 1F1B, interleaved if the recipe has V, with its layers and recompute
- *Ours*: the first of `v-zb`, `v-half` and `v-min` that fits, otherwise `v-min`
- *GiB*: memory of the fullest rank as a [dry run](dry-run.md) counts it, with eight messages; bold if it is more than
  the GPU has; ≈ if a part of the model is [not counted](#not-counted)
- *Time*: our planned iteration time over stock's, both by the model's arithmetic, with recompute as in the recipe.
  Above 1 stock's interleaving is better: many chunks, few microbatches
"""
_HALF = """These recipes recompute parts of each layer. The last columns show what half of 1F1B's activation memory
buys: `v-half` without any recompute. *Time* is its planned iteration time over that of stock's schedule with recompute.
It counts large matrix products only: recompute of `layernorm`, of `moe_act`, and of `mlp` where all but a few layers
have experts, is taken as free, so the real gain is larger.
"""
_NOT_COUNTED = """## Not counted

- Low-rank adapters (`peft`) and hyper-connections: no figures are given.
- `nemotron_3_super_pretrain_64gpu_h100_bf16` is left out: the sizes of this hybrid model would have to be downloaded.
- Linear, sparse and compressed attention are counted as full attention, and vision encoders are left out.
- Offloading of activations (`fine_grained_activation_offloading`) is counted as if it were off.
- CUDA graphs: neither their memory nor their speed. Messages between experts are not in the time.
"""
