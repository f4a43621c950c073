"""Answers for recipes: as text, and as docs/recipes.md."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

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
_HEADS = (
    ("recipe", ""),
    ("GPU", ""),
    ("sizes", ""),
    ("n", ""),
    ("linears", ""),
    ("stock", ""),
    ("bubble", ""),
    ("GiB", ""),
    ("ours", ""),
    ("bubble", ""),
    ("GiB", ""),
    ("time", "to stock's"),
    ("accepted", ""),
)
_HALF_HEADS = (
    ("recipe", ""),
    ("recomputes", ""),
    ("GPU", "GiB"),
    ("stock", "GiB"),
    ("stock without recompute", "GiB"),
    ("v-half without recompute", "GiB"),
    ("time", "to stock's"),
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
    recomputing = [each for each in answers if each.half is not None and not each.refused]
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
            markdown(_HALF_HEADS, [_half(each) for each in sorted(recomputing, key=lambda each: each.name)]),
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
        f"| {len(answers)} | have pipeline parallelism |",
        f"| **{len(accepted)}** | are accepted as they are |",
        f"| **{len(without)}** | are accepted without [some arguments](#what-has-to-be-left-out) |",
    ]
    reasons = Counter(each.refused for each in refused)
    lines += [f"| {count} | are refused: {_reason(why)} |" for why, count in reasons.most_common()]
    return "\n".join(lines) + "\n"


def _reason(why: str) -> str:
    return re.sub(r"(--[a-z0-9-]+)", r"`\1`", why)


def _left_out(answers: Iterable[Answer]) -> str:
    reasons: dict[str, tuple[int, int, str]] = {}
    for each in answers:
        for argument, why in each.left_out.items():
            count, alone, _ = reasons.get(argument, (0, 0, ""))
            reasons[argument] = count + 1, alone + (len(each.left_out) == 1), why.partition(": ")[2]
    rows = [
        [f"`{argument}`", str(count), str(alone), why]
        for argument, (count, alone, why) in sorted(reasons.items(), key=lambda item: -item[1][0])
    ]
    return markdown((("argument", ""), ("recipes", ""), ("of them only this", ""), ("why", "")), rows)


def _row(each: Answer) -> list[str]:
    mark = "≈" if each.unknown else ""
    said = "no: see above" if each.refused else "yes"
    if each.left_out:
        said = "without " + ", ".join(f"`{argument}`" for argument in each.left_out)
    ours = None if each.refused else each.ours
    return [
        each.name.removesuffix("_config"),
        f"{each.gpus} {each.device}",
        each.sizes,
        str(each.microbatches),
        each.precision,
        *_cells(each.stock, each.gib, mark),
        *_cells(ours, each.gib, mark),
        f"{mark}{ours.time:.2f}" if ours is not None else "",
        said,
    ]


def _cells(planned: Planned | None, gib: float, mark: str) -> Iterator[str]:
    if planned is None:
        return iter(("", "", ""))
    return iter((planned.schedule, f"{100 * planned.bubble:.1f} %", mark + _much(planned, gib)))


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
pipeline parallelism this page says whether our schedules accept it, which arguments have to be left out, and which
bubble and memory are planned, beside stock's schedule. `tools/recipes` writes this page. Nothing on it was measured on
a GPU.

"""
_GUIDE = """To train a recipe with a schedule, give two flags:

```sh
--pipeline-schedule v-half --pipeline-layers auto        # or v-zb, as the recipe's row says
```

They replace the virtual pipeline size and the layer layout of the recipe (`virtual_pipeline_model_parallel_size`,
`pipeline_model_parallel_layout`, `account_for_..._in_pipeline_split`). The figures of this page are without a search
for layers. `--pipeline-schedule auto` searches for minutes, also for layers and recompute
([which schedule](which-schedule.md)).

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
_LEGEND = """*Sizes*: T tensor, C context, E expert and P pipeline parallel ranks, V chunks of stock's schedule.
*n*: microbatches. *GiB*: memory of the fullest rank as a [dry run](dry-run.md) counts it, with eight messages; bold if
it is more than the GPU has. *Ours*: of `v-zb`, `v-half` and `v-min` the shortest that fits, or the one that needs least
memory if none fits. *Time*: planned iteration time over that of stock's schedule, both by the model's
arithmetic, with recompute as in the recipe. ≈: a part of the model is [not counted](#not-counted).
"""
_HALF = """These recipes recompute parts of each layer. The last columns show what half of 1F1B's activation memory
buys: `v-half` without any recompute. *Time* is its planned iteration time over that of stock's schedule with recompute.
It counts matrix products only: recompute of `layernorm` and `moe_act` is taken as free, so the real gain is larger.
"""
_NOT_COUNTED = """## Not counted

- Low-rank adapters (`peft`), hybrid models and hyper-connections: no figures are given.
- Linear, sparse and compressed attention are counted as full attention, and vision encoders are left out.
- Offloading of activations (`fine_grained_activation_offloading`) is counted as if it were off.
- CUDA graphs: neither their memory nor their speed. Messages between experts are not in the time.
"""
