"""Writes docs/accuracy.md."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from textwrap import fill

from benchmarks.accuracy.fit import NAMES, numbers
from benchmarks.accuracy.layers import MeasuredLayers, measured_layers
from benchmarks.accuracy.report import Predicted, Report, Run, summary
from megatron.schedules.estimate.build_flags import GRAPHS, WHOLE
from megatron.schedules.estimate.calibration import CALIBRATED, REACHED
from megatron.schedules.report.table import markdown

# What estimates should reach: the median error and the share within 10 % without a row's own model, and of schedules'
# ratios to 1F1B the points of speed, of V-Min's, and of memory.
_MEDIAN, _MEDIAN_OF_SORT, _WITHIN = 0.08, 0.10, 0.65
_POINTS, _POINTS_OF_V_MIN, _POINTS_OF_MEMORY = 0.04, 0.06, 0.05
_GPU_PAIRS, _SETTING_PAIRS = 90 / 98, 100 / 125


def as_page(report: Report) -> str:
    """Returns the page."""
    measured = measured_layers()
    return "\n".join(
        [
            _HEAD,
            "## Errors\n",
            _errors(report),
            "## Pairs of rows\n",
            _PAIRS,
            _pairs(report),
            "## Schedules\n",
            _SCHEDULES,
            *(_run(run) for run in report.runs),
            "## Low-rank adapters\n",
            _ADAPTERS,
            markdown(_ROW_HEADS, [_row(each) for each in report.adapters]),
            "## Layers on one GPU\n",
            _layers(measured),
            "### Layers with experts\n",
            _experts(measured),
            "## Where it fails\n",
            _fails(report),
            "## What is fitted\n",
            _FITTED,
            _numbers(),
            "## Every row\n",
            _ROWS,
            markdown(_ROW_HEADS, [_row(each) for each in report.rows]),
        ]
    )


def _errors(report: Report) -> str:
    rows = report.rows
    sorts = [("all", list(rows))]
    sorts += [
        (name, [each for each in rows if each.row.has_experts == has_experts])
        for name, has_experts in (("dense", False), ("with experts", True))
    ]
    sorts += [(name, [each for each in rows if each.row.name == name]) for name in sorted({r.row.name for r in rows})]
    cells = []
    for name, members in sorts:
        if not members:
            continue
        own, other = (summary([getattr(each, of) for each in members]) for of in ("error", "error_without"))
        speed = median(each.ratio for each in members)
        cells.append(
            [
                name,
                str(len(members)),
                f"{speed:.2f}",
                *(_percent(each) for each in own),
                *(_percent(each) for each in other),
            ]
        )
    tuned, unknown = report.left_out
    note = f"{tuned} rows of fine-tuning of all weights are left out"
    note += f", and {unknown} of models that are not known here" * bool(unknown)
    return f"{markdown(_ERROR_HEADS, cells)}\n{note}.\n"


def _pairs(report: Report) -> str:
    cells = [[f"another {what}", str(right), str(every)] for what, (right, every) in report.pairs.items()]
    return markdown((("pairs that differ in", ""), ("in the measured order", ""), ("of", "")), cells)


def _run(run: Run) -> str:
    cells = [
        [
            name,
            f"{run.speeds[name][0]:.3f}",
            f"{run.speeds[name][1]:.3f}",
            f"{100 * (run.speeds[name][0] - run.speeds[name][1]):+.1f}",
            f"{run.memory[name][0]:.3f}",
            f"{run.memory[name][1]:.3f}",
            f"{100 * (run.memory[name][0] - run.memory[name][1]):+.1f}",
        ]
        for name in run.speeds
    ]
    predicted, measured = run.tokens
    return (
        f"**{run.name}**, {run.microbatches} microbatches. 1F1B: {predicted:,.0f} tokens/s/GPU predicted, "
        f"{measured:,.0f} measured.\n\n{markdown(_RUN_HEADS, cells)}\n"
    )


def _layers(measured: MeasuredLayers) -> str:
    cells = [
        [
            layer.name,
            *(cell for pair in layer[1:6] for cell in (["", ""] if pair is None else map("{:.1f}".format, pair))),
        ]
        for layer in measured.layers
    ]
    ratios = [layer.ratio for layer in measured.layers if layer.ratio is not None]
    split = " and ".join(f"{middle:.3f} (quartiles {low:.3f} and {high:.3f})" for low, middle, high in ratios)
    words = fill(_LAYERS.format(where=measured.where, split=split), 120, break_long_words=False)
    return f"{words}\n\n{markdown(_LAYER_HEADS, cells)}\n"


def _experts(measured: MeasuredLayers) -> str:
    cells = [[layer.name, *(f"{each:.1f}" for pair in layer[1:] for each in pair)] for layer in measured.experts]
    whole, split = measured.kernels
    words = fill(_EXPERTS.format(whole=whole, split=split), 120, break_long_words=False)
    return f"{words}\n\n{markdown(_EXPERT_HEADS, cells)}\n"


def _fails(report: Report) -> str:
    return "\n".join(f"- {line}" for line in misses(report)) + "\n"


def misses(report: Report) -> Iterator[str]:
    """Yields a line for each goal: whether it is reached."""
    rows = report.rows
    for name, members, goal in (
        ("all rows", list(rows), _MEDIAN),
        ("dense models", [each for each in rows if not each.row.has_experts], _MEDIAN_OF_SORT),
        ("models with experts", [each for each in rows if each.row.has_experts], _MEDIAN_OF_SORT),
    ):
        if members:
            found = summary([each.error_without for each in members])[0]
            yield (
                f"{_said(found <= goal)}: median error of {name} without their own model at most {_percent(goal)}: "
                f"{_percent(found)}"
            )
    found = summary([each.error_without for each in rows])[1]
    yield (
        f"{_said(found >= _WITHIN)}: {_percent(_WITHIN)} of rows within 10 % without their own model: {_percent(found)}"
    )
    for what, goal in (("GPU", _GPU_PAIRS), ("setting", _SETTING_PAIRS)):
        right, every = report.pairs[what]
        if every:
            yield (
                f"{_said(right >= goal * every)}: {_percent(goal)} of the pairs that differ in {what} in the measured "
                f"order: {_percent(right / every)}"
            )
    for run in report.runs:
        for name, (predicted, measured) in run.speeds.items():
            goal = _POINTS_OF_V_MIN if name == "v-min" else _POINTS
            if abs(predicted - measured) > goal:
                points = 100 * (predicted - measured)
                yield f"Missed: speed of {name}, {run.name}: {points:+.1f} points, goal {100 * goal:.0f}"
        for name, (predicted, measured) in run.memory.items():
            if abs(predicted - measured) > _POINTS_OF_MEMORY:
                yield (
                    f"Missed: memory of {name}, {run.name}: {100 * (predicted - measured):+.1f} points, goal "
                    f"{100 * _POINTS_OF_MEMORY:.0f}"
                )
    worst = sorted(rows, key=lambda each: -each.error)[:_WORST]
    named = "; ".join(f"{each.row.name} on {each.row.gpu} in {each.row.release} ({each.ratio:.2f})" for each in worst)
    yield f"The rows that are farthest off, predicted over measured speed: {named}"


def _said(reached: bool) -> str:
    return "Reached" if reached else "Missed"


def _numbers() -> str:
    cells = [[name, f"{number:.3g}"] for name, number in zip(NAMES, numbers(CALIBRATED), strict=True)]
    for name in ("hopper", "cdna3"):
        in_w, price = REACHED[name].attention_in_w, REACHED[name].splitting
        cells += [[f"attention_in_w, {name}", f"{in_w:.3g}"], [f"splitting, {name}", f"{price:.3g}"]]
    return markdown((("number", ""), ("value", "")), cells)


def _row(each: Predicted) -> list[str]:
    row = each.row
    sizes = {"T": row.tensor, "C": row.context, "E": row.expert, "P": row.pipeline, "V": row.chunks}
    graphs = {WHOLE: "whole", GRAPHS: "partial"}.get(row.graphs, "")
    predicted = row.tokens * each.ratio
    return [
        row.release,
        row.name,
        f"{row.gpus} {row.gpu}",
        row.precision,
        " ".join(f"{letter}{size}" for letter, size in sizes.items() if size > 1),
        str(row.micro),
        str(row.microbatches),
        graphs if row.has_experts else "",
        f"{predicted:,.0f}",
        f"{row.tokens:,.0f}",
        f"{each.ratio:.2f}",
        f"{row.measured / each.without:.2f}" if each.without else "",
    ]


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share < 0.3 else f"{100 * share:.0f} %"


_WORST = 6
_HEAD = """# Accuracy of estimates

How far off are the times that a [dry run](dry-run.md), the grid search and the [recipes](recipes.md) estimate for a GPU
by its name? This page holds them against measurements that NVIDIA and AMD published, of jobs without this package, and
against [layers on one GPU](#layers-on-one-gpu). A measurement of your own is better than any estimate:
`--pipeline-measure DIR`, then `--pipeline-costs DIR/costs.json` ([measure](measure.md)).

`python -m benchmarks accuracy` writes this page, in about a minute. `--rows FILE` takes other measurements in the
form of `benchmarks/accuracy/measured.json`, which has the public sources.
"""
_ERROR_HEADS = (
    ("rows", ""),
    ("number", ""),
    ("median of predicted over measured speed", ""),
    ("median error", ""),
    ("within 10 %", ""),
    ("90 % of rows within", ""),
    ("without the model: median error", ""),
    ("within 10 %", ""),
    ("90 % of rows within", ""),
)
_PAIRS = """Which of two settings is faster? Pairs of the first kind have the same model, precision and release on
another GPU. Those of the second kind have the same model, precision and GPU in another setting, of any release. Pairs
whose measurements differ by less than 1 % are left out.
"""
_SCHEDULES = """AMD measured schedules in Primus. It does not say how many microbatches there were. Shown is the number
of some plausible ones with which the speeds fit best. All figures but tokens are relative to 1F1B. Memory is that of
the fullest rank; what AMD measured contains the allocator's reserves.
"""
_RUN_HEADS = (
    ("schedule", ""),
    ("speed: predicted", ""),
    ("measured", ""),
    ("points", ""),
    ("memory: predicted", ""),
    ("measured", ""),
    ("points", ""),
)
_ADAPTERS = """NVIDIA's fine-tuning of Llama-3-70B that trains adapters of rank 16 for `linear_qkv` (LoRA). Nothing
is fitted to these rows. Columns are those of [every row](#every-row).
"""
_LAYERS = """Passes of two decoder layers, and of an output layer with its loss, measured with this package alone on one
GPU: bf16, one sequence of 8192, without fused kernels of the loss. Predicted is what a dry run for that GPU counts for
them. Only the ratio of I to W is fitted to them (`attention_in_w`). The whole backward is predicted too long here:
it contains what whole jobs lose elsewhere. I and W together took {split} of the whole backward, so estimates for
NVIDIA's GPUs have no price of splitting. Measured on {where}; `python -m benchmarks split` measures another GPU."""
_EXPERTS = """One layer with all its 128 experts on the same GPU, one sequence of 4096, experts' tokens permuted without
fused kernels: what a microbatch keeps. Such a layer takes as long as its host, which starts hundreds of small products,
so its times say little about the GPU. For each expert the host took some 65 microseconds (`each_expert` of
`megatron/schedules/estimate/calibration.py`). The kernels of all linears in the backward of Qwen3-235B-A22B's layer
took {whole:.1f} ms whole and {split:.1f} ms split."""
_EXPERT_HEADS = (
    ("MiB", ""),
    ("from F to I: predicted", ""),
    ("measured", ""),
    ("from I to W: predicted", ""),
    ("measured", ""),
)
_LAYER_HEADS = (
    ("milliseconds", ""),
    ("F: predicted", ""),
    ("measured", ""),
    ("whole backward: predicted", ""),
    ("measured", ""),
    ("I: predicted", ""),
    ("measured", ""),
    ("W: predicted", ""),
    ("measured", ""),
    ("kept from F to I, MiB: predicted", ""),
    ("measured", ""),
)
_FITTED = """These numbers of `megatron/schedules/estimate/calibration.py` are fitted to the rows of this page. The
errors "without the model" are those of numbers that were fitted to the rows of all other models. A number that the rows
say little about stays near what is expected without them. The last four divide a backward into I and W. Those of
Hopper, which NVIDIA's later GPUs have too, were measured in layers on one GPU. Those of CDNA3, which CDNA4 has too, are
fitted to AMD's schedules.
"""
_ROWS = """- *Sizes*: T tensor, C context, E expert and P pipeline parallel ranks, V chunks of a rank under interleaved
  1F1B; *n*: microbatches
- *Graphs*: CUDA graphs of models with experts: of a whole iteration, or of parts of each layer
- *Ratio*: predicted over measured speed; *without*: by numbers that were fitted without this model
"""
_ROW_HEADS = (
    ("release", ""),
    ("model", ""),
    ("GPUs", ""),
    ("linears", ""),
    ("sizes", ""),
    ("micro batch", ""),
    ("n", ""),
    ("graphs", ""),
    ("predicted tokens/s/GPU", ""),
    ("measured", ""),
    ("ratio", ""),
    ("without", ""),
)
