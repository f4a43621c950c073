"""Writes docs/retuned.md."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from statistics import median

from benchmarks.retune.retuned import NUMBERS, Figures, Retuned
from megatron.schedules.estimate.device_memory import usable
from megatron.schedules.report.table import markdown

# A gain that is worth a word.
_WORTH = 1.01
# Of a recipe that was searched with earlier numbers.
_MARK = "†"
_HEADS = (
    ("recipe", ""),
    ("setting", ""),
    ("schedule", ""),
    ("sizes", ""),
    ("n", ""),
    ("recompute", ""),
    ("MFU", ""),
    ("bubble", ""),
    ("GiB", ""),
    ("speed", ""),
)


def pair(name: str, device: str) -> tuple[str, str]:
    """Returns the model and the GPU of a recipe."""
    return name.partition("_pretrain_")[0], device


def as_page(found: Sequence[Retuned], every: Collection[tuple[str, str]]) -> str:
    """Returns the page.

    Args:
        found: the recipes that were searched.
        every: models and GPUs of all recipes with a pipeline.
    """
    ordered = sorted(found, key=lambda each: each.name)
    return "\n".join(
        [
            _HEAD.format(len(ordered), len({pair(each.name, each.device) for each in ordered} & {*every}), len(every)),
            *_summary(ordered),
            *_older(ordered),
            "",
            "## Every recipe\n",
            _LEGEND,
            markdown(_HEADS, [row for each in ordered for row in _rows(each)]),
            "## What changed, and why\n",
            *(f"- **{each.name}**: {_why(each)}" for each in ordered),
            "",
            _COMMAND,
        ]
    )


def _summary(found: Sequence[Retuned]) -> Iterator[str]:
    both = [each for each in found if each.own and each.stock and each.over_stock and each.over_own]
    if not both:
        return
    stock = [each.own.seconds / each.stock.seconds for each in both if each.own and each.stock]
    over = [each.over_stock for each in both if each.over_stock]
    own = [each.over_own for each in both if each.over_own]
    yield f"- The best of stock is {median(stock):.2f} times as fast as NVIDIA's setting in the median."
    yield f"- The best of ours is {median(own):.2f} times as fast as NVIDIA's setting, and {median(over):.2f} times as"
    yield "  fast as the best of stock."
    better = sum(each >= _WORTH for each in over)
    worse = sum(each <= 1 / _WORTH for each in over)
    yield f"- Ours is at least 1 % faster than the best of stock for {better} of {len(both)} recipes, and at least 1 %"
    yield f"  slower for {worse}."


def _older(found: Sequence[Retuned]) -> Iterator[str]:
    """Says what a mark at recipes means that were searched with other numbers than today's."""
    if count := sum(map(_is_older, found)):
        yield f"- {count} of {len(found)} recipes, marked {_MARK}, were searched with"
        yield "  [earlier numbers](accuracy.md#what-is-fitted). Compare them with no other recipe."


def _is_older(each: Retuned) -> bool:
    return each.numbers != NUMBERS


def _rows(each: Retuned) -> Iterator[list[str]]:
    name = f"{each.name}, {each.gpus} {each.device}, {each.precision}" + f" {_MARK}" * _is_older(each)
    for what, figures in (("NVIDIA's", each.own), ("best of stock", each.stock), ("best of ours", each.ours)):
        if figures is None:
            yield [name, what, "does not fit"]
            continue
        speed = "" if each.own is None else f"{each.own.seconds / figures.seconds:.3f}"
        if what == "best of ours" and each.over_own is not None:
            speed = f"{each.over_own:.3f}"
        yield [
            name,
            what,
            figures.schedule,
            figures.sizes,
            str(figures.microbatches),
            figures.recompute,
            f"{100 * figures.mfu:.1f} %",
            f"{100 * figures.bubble:.1f} %",
            f"{figures.gib:.0f}",
            speed,
        ]
        name = ""


def _why(each: Retuned) -> str:
    ours, beside = each.ours, each.beside
    if ours is None:
        return "no setting of ours fits."
    said = [_changes(each.own, ours)]
    if each.left_out:
        said.append(f"ours loses `{'`, `'.join(each.left_out)}`")
    if beside is not None:
        room = usable(each.gib)
        there = f"stock's {beside.schedule} of the same sizes"
        if beside.gib > room:
            said.append(f"{there} needs {beside.gib:.0f} GiB of {room:.0f}, ours {ours.gib:.0f}")
        else:
            bubbles = f"{100 * beside.bubble:.1f} % of {there} and {100 * ours.bubble:.1f} % of ours"
            said.append(f"bubbles are {bubbles}, times {beside.seconds:.2f} and {ours.seconds:.2f} s")
    if each.is_limited:
        said.append("no more than 1 % over it is claimed")
    if each.over_stock is not None and each.over_stock < _WORTH:
        said.append("**stock is as fast or faster** with a setting of its own")
    if each.gap:
        said.append(f"settings that were not planned might be up to {100 * each.gap:.0f} % faster")
    said += [f"not counted: {what}" for what in each.unknown]
    return "; ".join(said) + "."


def _changes(own: Figures | None, ours: Figures) -> str:
    if own is None:
        return f"{ours.sizes}, {ours.schedule}"
    if own.sizes == ours.sizes:
        return f"sizes stay, {own.schedule} → {ours.schedule}"
    again = (
        "" if own.recompute == ours.recompute else f", recompute {own.recompute or 'none'} → {ours.recompute or 'none'}"
    )
    return f"{own.sizes} → {ours.sizes}, {own.schedule} → {ours.schedule}{again}"


_HEAD = """# Retuned recipes

What is the fastest setting of a recipe, with stock Megatron alone and with the schedules of this package? NVIDIA tunes
its recipes for stock's schedules. A schedule that needs less memory may allow a smaller tensor parallel size, a larger
microbatch or less recompute. Each row is the result of [a search](which-schedule.md#which-setting-on-how-many-gpus)
over all parallel sizes, microbatch sizes, recompute and schedules.

All figures are [estimates](accuracy.md). **Nothing on this page ran on a GPU.** Estimates of settings are less exact
the further they are from those that NVIDIA measured: most of these have microbatches of one sample and little
recompute. Where a row changes much, try it first.

{} recipes were searched, of {} of {} pairs of model and GPU. The others are of DeepSeek-V4, whose
compressed attention is counted as full attention.
"""
_LEGEND = """- *Sizes*: tensor (TP), context (CP), expert (EP) and pipeline parallel sizes (PP), chunks of a rank under
  stock's interleaved schedule (VP), and samples of a microbatch (MB); sizes of 1 are left out
- *NVIDIA's*: the recipe's setting and its layers of stages. *Best of stock*: any setting, with levelled layers, with
  stock's own overlap of experts' messages and its CUDA graphs; NVIDIA's setting counts too. *Best of ours*: without
  what our schedules lose
- *Speed*: of NVIDIA's setting. No more than 1 % is claimed over a setting of stock with the same sizes whose bubble is
  smaller
- *MFU*: of the peak in the recipe's precision. *GiB*: of the fullest rank. All settings but NVIDIA's take at most 90 %
  of the GPU
"""
_COMMAND = """## How this page is made

```sh
python -m benchmarks.retune --bridge bridge --json docs/retuned.json --page docs/retuned.md NAMES
```

[retuned.json](retuned.json) has all figures, with the layers of each stage. `tools/grid_search.py --recipe NAME
--bridge bridge` prints more of one recipe, with lines to paste. [NVIDIA's recipes](recipes.md) says what to install.
"""
