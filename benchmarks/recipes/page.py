"""Answers for recipes: as text, and as docs/recipes.md."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median

from benchmarks.recipes.answer import Answer, Planned
from megatron.schedules.estimate.device_memory import RESERVED
from megatron.schedules.report.table import markdown

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
    ("levelled:", "bubble"),
    ("named", ""),
    ("bubble", ""),
    ("GiB", ""),
    ("balance", ""),
    ("schedule", ""),
    ("others", ""),
    ("gain", ""),
    ("accepted", ""),
)
_FLAG_HEADS = (("recipe", ""), ("named", ""), ("layers of each stage", ""))
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
        ("stock with levelled layers", answer.levelled),
        ("ours with stock's pass times", answer.alike),
        ("ours", answer.ours),
        ("auto", answer.auto),
        ("stock without recompute", answer.without),
        ("half the activation memory, without recompute", answer.half),
    ):
        if planned is not None:
            again = f", {100 * planned.recomputed:.0f} % of the layers recomputed" * bool(planned.recomputed)
            lines.append(
                f"  {name}: {planned.schedule}{again}, planned bubble {100 * planned.bubble:.1f} %, "
                f"{planned.gib:.1f} GiB of {answer.gib:g} on the fullest rank, "
                f"{planned.activations:.1f} of them activations, iteration time {planned.time:.3f} of stock's"
                + f", layers {planned.layers}"
                * (planned in (answer.ours, answer.auto))
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
    ordered = sorted(answers, key=lambda each: each.name)
    for each in ordered:
        family = next((title for start, title in _FAMILIES.items() if each.name.startswith(start)), "Others")
        families.setdefault(family, []).append(each)
    tables = (f"### {family}\n\n{markdown(_HEADS, [_row(each) for each in rows])}" for family, rows in families.items())
    return _HEAD + "\n".join(
        [
            _counts(answers),
            "## What blocks the others\n",
            _BLOCKED,
            _left_out(answers),
            _GUIDE,
            "## Every recipe\n",
            _LEGEND,
            *tables,
            "## Flags of each recipe\n",
            _FLAGS,
            markdown(_FLAG_HEADS, [_flags(each) for each in ordered if each.gains is not None and not each.refused]),
            _OWN,
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
        f"| {len(answers)} | have pipeline parallelism |",
        f"| **{len(accepted)}** | are accepted as they are |",
        f"| **{len(without)}** | are accepted after a [setting](#what-blocks-the-others) or more is left out |",
    ]
    reasons = Counter(each.refused for each in refused)
    lines += [f"| **{count}** | are refused: *{_reason(why)}* |" for why, count in reasons.most_common()]
    lines += ["", *_gained(answers)]
    stock, half = _fitting(answers, "without"), _fitting(answers, "half")
    lines += [
        f"- {len(_recomputing(answers))} recipes recompute. Without recompute {stock} of them fit their GPU under",
        f"  stock's schedule, and {half} under `v-half` ([table](#recipes-that-recompute)).",
    ]
    return "\n".join(lines) + "\n"


def _gained(answers: Sequence[Answer]) -> list[str]:
    """Lines about the gains of the recipes whose times were planned, and of groups of them."""
    timed = [(each, gains) for each in answers if (gains := each.gains) is not None and not each.refused]
    if not timed:
        return []
    groups = {
        "all of them": timed,
        "stock's schedule is interleaved": [pair for pair in timed if "V" in pair[0].sizes],
        "it is 1F1B": [pair for pair in timed if "V" not in pair[0].sizes],
        "at most four microbatches a rank": [pair for pair in timed if _is_short(pair[0])],
    }
    names = "recipes", "number", "balance", "schedule", "others", "gain", "gain of 1 % or more", "loss of 1 % or more"
    rows = [
        [
            name,
            str(len(pairs)),
            *(_share(median(values)) for values in zip(*(gains for _, gains in pairs), strict=True)),
            str(sum(gains.whole >= _CLAIMED for _, gains in pairs)),
            str(sum(gains.whole <= -_CLAIMED for _, gains in pairs)),
        ]
        for name, pairs in groups.items()
        if pairs
    ]
    return [_GAINED.format(len(timed)), markdown([(name, "") for name in names], rows)]


def _is_short(answer: Answer) -> bool:
    ranks = re.search(r"P(\d+)", answer.sizes)
    return ranks is not None and answer.microbatches <= _FEW * int(ranks[1])


def _share(part: float) -> str:
    return f"{100 * part:+.1f} %"


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
    ours, gains = None if each.refused else each.ours, each.gains
    return [
        each.name.removesuffix("_config"),
        f"{each.gpus} {each.device}",
        each.sizes,
        str(each.microbatches),
        each.precision,
        *_cells(each.stock, each.gib, mark, timed=gains is not None),
        "" if each.levelled is None else f"{100 * each.levelled.bubble:.1f} %",
        "" if ours is None else ours.schedule,
        *_cells(ours, each.gib, mark, timed=gains is not None),
        *([""] * 4 if gains is None or each.refused else map(_share, gains)),
        said,
    ]


def _flags(each: Answer) -> list[str]:
    assert each.ours is not None, "it is planned"
    return [each.name.removesuffix("_config"), each.ours.schedule, each.ours.layers]


def _cells(planned: Planned | None, gib: float, mark: str, *, timed: bool) -> tuple[str, str]:
    if planned is None:
        return "", ""
    return f"{100 * planned.bubble:.1f} %" if timed else "", mark + _much(planned, gib)


def _half(each: Answer) -> list[str]:
    assert each.stock is not None and each.without is not None and each.half is not None, "it recomputes"
    return [
        each.name.removesuffix("_config"),
        each.recompute,
        f"{each.gib:g}",
        *(_much(planned, each.gib) for planned in (each.stock, each.without, each.half)),
        "" if each.levelled is None else f"{each.half.time:.2f}",
    ]


def _much(planned: Planned, gib: float) -> str:
    much = f"{planned.gib:.0f}"
    return f"**{much}**" if planned.gib > gib else much


_HEAD = """# NVIDIA's recipes

Can you train your recipe with a schedule of this package, and what do you gain? Megatron-Bridge 0.6.2 has performance
recipes for H100, B200, B300, GB200, GB300 and VR200. This page has a row for [each](#every-recipe) with pipeline
parallelism. All figures are planned. Nothing on this page was measured on a GPU. In short: a schedule of this package
pays where stock runs plain 1F1B, and where memory decides. It does not pay where stock interleaves with balanced
layers.

"""
_BLOCKED = """These settings have to be left out. The first number counts the recipes with a setting. The second one
counts those that have no other of the table.
"""
_GUIDE = """## How to train a recipe

Put two lines at the top of the script, and set two chunks in the recipe ([other loops](loops.md)):

```python
import megatron.schedules
megatron.schedules.install(schedule="v-half", layers="8,8,8,8,8,8,8,5")  # as the recipe's row says
cfg.model.virtual_pipeline_model_parallel_size = 2
```

`layers` are the layers of each stage in model order, see [flags of each recipe](#flags-of-each-recipe). The first stage
and the last one have the embedding and the output layer. Leave the recipe's own layers of stages out
(`pipeline_model_parallel_layout`, `account_for_..._in_pipeline_split`). A script of Megatron-LM takes
`--pipeline-schedule v-half --pipeline-layers 8,8,8,8,8,8,8,5` instead, or `--pipeline-layers auto`.

A schedule switches off some settings by itself: the bulk overlaps of `tp_comm_overlap`
([tensor parallel](gpu.md#what-overlaps-with-computing)) and `defer_embedding_wgrad_compute`. These recipes count as
accepted.
"""
_OWN = """## Your own recipe

```sh
python -m benchmarks.recipes train.sh --gpus 64 --device H100          # a script with Megatron-LM's flags
pip download --no-deps megatron-bridge==0.6.2 && unzip megatron_bridge-*.whl -d bridge
pip install "transformers>=5.8,<=5.12.1" accelerate einops hydra-core omegaconf peft
python -m benchmarks.recipes --bridge bridge llama3_70b_pretrain_64gpu_h100_bf16_config
```

The tool calls the recipe and reads the `ConfigContainer` that it returns. No GPU is needed. What Bridge imports and is
not installed, such as Transformer Engine, is replaced by empty modules. Models of the recipes on this page are not
downloaded from Hugging Face.
"""
_LEGEND = f"""- *Sizes*: T tensor, C context, E expert and P pipeline parallel ranks, V chunks of a rank under stock's
  interleaved schedule; *n*: microbatches
- *Stock*: 1F1B, interleaved if the recipe has V, with its layers, recompute, CUDA graphs and overlap of experts'
  messages. *Levelled*: the same with layers with which ranks take about equal time
- *Named*: the first of `v-zb`, `v-half` and `v-min` that fits in {100 * (1 - RESERVED):.0f} % of the GPU, otherwise
  `v-min`. Its stages have the [layers](#flags-of-each-recipe) with which ranks take about equal time
- *GiB*: memory of the fullest rank as a [dry run](dry-run.md) counts it; bold if it is more than the GPU has;
  ≈ if a part of the model is [not counted](#not-counted)
- *Balance*: time that stock spares with levelled layers, without this package. *Schedule*: time that our schedule
  spares on top, with stock's pass times; splitting has [no price](accuracy.md#layers-on-one-gpu). *Others*: what
  experts' messages behind weight gradients spare, less what the recipe loses: its own overlap of these messages.
  Fused experts are not split, so they leave less for W.
  *Gain*: schedule and others together. It is at most 1 % where our bubble is larger than that of stock with levelled
  layers, which these estimates are not exact enough to outweigh
"""
_FLAGS = """`layers="..."` of `install`, or `--pipeline-layers`.
"""
_HALF = """These recipes recompute parts of each layer. The last columns show what half of 1F1B's activation memory
buys: `v-half` without any recompute. *Time* is its planned iteration time over that of stock's schedule with recompute
and levelled layers. It counts large matrix products only: recompute of `layernorm`, of `moe_act`, and of `mlp` where
all but a few layers have experts, is taken as free, so the real gain is larger.
"""
_GAINED = """Times are [estimates for the recipe's GPU](accuracy.md), of {} recipes. Gains are over stock's schedule
with its own CUDA graphs, its own overlap, and levelled layers. All are medians:
"""
# A gain or a loss that is worth a word, and microbatches of a rank that are few.
_CLAIMED, _FEW = 0.01, 4
_NOT_COUNTED = """## Not counted

- Weights of the maps of hyper-connections, and what recompute of `mhc` holds for several layers at once.
- Linear, sparse and compressed attention are counted as full attention, and vision encoders are left out.
- Offloading of activations (`fine_grained_activation_offloading`) is counted as if it were off.
- Memory of CUDA graphs of whole iterations: samples of all microbatches, and what the allocator keeps from before.
- Pages of a stash, and rows of experts without tokens (`moe_paged_stash`, `moe_expert_rank_capacity_factor`).
"""
