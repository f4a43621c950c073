"""The paper's comparisons by the simulator and the memory model: equal microbatches, and the grid search."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

from benchmarks.parts import Claim, Part, Row, Say, markdown_table, span, verdict
from megatron.schedules.estimate.device_memory import usable
from megatron.schedules.estimate.devices import DEVICES, GIB
from megatron.schedules.estimate.model_build import StockRecompute
from megatron.schedules.estimate.models import MODELS
from megatron.schedules.estimate.roofline import corrections
from megatron.schedules.estimate.times import ONES, PassTimes
from megatron.schedules.measure.cost_file import read_profile
from megatron.schedules.utils.child_processes import worker_pool
from tools._grid import search_all
from tools._iteration import Estimate, estimate
from tools._methods import ADAPTIVE, METHODS, ONE_F_ONE_B, SAVING, Method
from tools._question import FULL, Question
from tools._setting import NONE, Setting

_DEVICE = DEVICES["A100-80GB"]
# arXiv 2405.15362, section 5: as many GPUs as pipeline ranks.
_SIZES = {"9.6B": 16, "21B": 24, "38.5B": 32}
_LENGTHS, _GPUS, _BATCH = (1024, 3072, 16384), 40, 160  # of the grid search
_SLOWER = 3  # links within a node, by so much, to see what tensor parallelism decides
_OURS = ("V-Min", "V-Half", "V-ZB", "adaptive")
_SAVING_NAMES = tuple(method.name for method in SAVING)
_SEARCH_SECONDS = 2.0
# The paper's, with 1F1B under full recompute.
_PAPER = (ONE_F_ONE_B, ONE_F_ONE_B._replace(name="1F1B-R"), *METHODS[2:])


_LIMITS = {"3/4": 0.75, "5/4": 1.25}  # of 1F1B's activation memory, for the search


def measure(quick: bool, say: Say, costs_file: Path | None = None) -> Iterator[Row]:
    """Yields a row for each method at each size, then one for each method of each grid search.

    Args:
        quick: a sample of both.
        say: is told what goes on.
        costs_file: a cost profile that corrects the roofline.
    """
    correction = ONES
    if costs_file is not None:
        profile = read_profile(costs_file)
        correction = corrections(profile, _DEVICE, MODELS["98.5B"])
        yield {"kind": "profile", "measured_on": profile.facts.device, "correction": list(correction)}
    yield from _equal_microbatches(quick, say, correction)
    questions = [
        Question(MODELS["98.5B"].of_length(length), _DEVICE, _GPUS, _BATCH, correction)
        for length in (_LENGTHS[-1:] if quick else _LENGTHS)
    ]
    say(f"grid search: {len(questions)} tables")
    yield from _searched("grid", questions, [*_PAPER, ADAPTIVE, *SAVING])
    if not quick:
        slower = replace(_DEVICE, link=_DEVICE.link / _SLOWER)
        questions = [replace(question, device=slower) for question in questions if question.model.sequence == 3072]
        yield from _searched("slower links", questions, [*_PAPER[:2], *_PAPER[4:]])


def _searched(kind: str, questions: Sequence[Question], methods: Sequence[Method]) -> Iterator[Row]:
    tasks = [
        (replace(question, recomputes=(_recompute(method),)), method) for question in questions for method in methods
    ]
    with worker_pool(2) as pool:
        found = search_all(pool, tasks, top=1, jobs=2)
    for (question, _), each in zip(tasks, found, strict=True):
        row = {"kind": kind, "sequence_length": question.model.sequence, "method": each.method.name}
        yield row | (
            _figures(each.best[0]) if each.best else {"mfu": None, "memory_gib": _gib(each.short and each.short.memory)}
        )


def _recompute(method: Method) -> StockRecompute:
    return FULL if method.name == "1F1B-R" else NONE


def _equal_microbatches(quick: bool, say: Say, correction: PassTimes) -> Iterator[Row]:
    settings = [
        Setting(
            *(method, MODELS[name], _DEVICE, 1, 1, gpus, 1, times * gpus),
            correction=correction,
            recompute=_recompute(method),
        )
        for name, gpus in (list(_SIZES.items())[:1] if quick else _SIZES.items())
        for times in ((2,) if quick else (2, 4, 8))
        for method in _PAPER
    ]
    say(f"equal microbatches: {len(settings)} settings")
    with worker_pool(2) as pool:
        for found in chain.from_iterable(pool.map(_estimates, settings)):
            names = {"model": found.setting.model.name, "method": found.setting.method.name}
            yield {"kind": "equal"} | names | _figures(found)


def _estimates(setting: Setting) -> list[Estimate]:
    """Returns the setting's estimates, and around 1F1B those of searches within other memory limits."""
    found = [estimate(setting)]
    for name, part in _LIMITS.items() if setting.method.name == "1F1B" else ():
        within = Method(f"adaptive {name}", "adaptive", 2, memory_limit=part * found[0].outcome.share)
        found.append(estimate(replace(setting, method=within), search_seconds=_SEARCH_SECONDS))
    return found


def _figures(found: Estimate) -> dict[str, object]:
    at = found.setting
    return {
        "data": at.data,
        "tensor": at.tensor,
        "pipeline": at.pipeline,
        "micro_batch_size": at.micro_batch,
        "microbatches": at.microbatches,
        "mfu": round(found.mfu, 5),
        "bubble": round(found.bubble, 5),
        "memory_gib": _gib(found.memory),
        "activations_gib": _gib(found.activations),
        "recomputed": round(found.outcome.recomputed, 5),
        "host_gib": _gib(found.host),
        "iteration_seconds": round(found.seconds, 5),
    }


def _gib(size: float | None) -> float | None:
    return None if size is None else round(size / GIB, 3)


def claims(rows: Sequence[Row]) -> list[Claim]:
    """Returns which of the paper's claims hold in the model."""
    equal, searched = _apart(rows)
    found = []
    gains = _ratios(equal, "mfu")
    for method in ("V-ZB", "V-Half", "V-Min"):
        low, high = min(gains[method]), max(gains[method])
        held = "held" if low >= 1.07 else "held in part" if high >= 1.07 else "not held"
        text = f"{method} is 7 % to 55 % faster than 1F1B, as the paper measured"
        found.append(Claim(text, f"{_percent(low)} to {_percent(high)}", held))
    memory = _ratios(equal, "activations_gib")
    for method, share in (("V-Half", 1 / 2), ("V-Min", 1 / 3)):
        low, high = min(memory[method]), max(memory[method])
        held = "held" if high <= share * 1.1 else "nearly" if low <= share * 1.25 else "not held"
        text = f"{method} needs {share:.3f} of 1F1B's activations, the paper's limit for long pipelines"
        found.append(Claim(text, f"{low:.3f} to {high:.3f}", held))
    for kind, where in (("grid", ""), ("slower links", f", links {_SLOWER} times slower")):
        for length, these in _by([row for row in searched if row["kind"] == kind], "sequence_length").items():
            gain, said = _best_of_ours(these)
            text = f"The best of ours is 16 % faster than the best 1F1B, as in the paper ({length} tokens{where})"
            found.append(Claim(text, said, verdict(gain is not None and gain >= 1.16)))
    return found


def section(rows: Sequence[Row]) -> str:
    """Returns how it was estimated, the picture, and the tables."""
    equal, searched = _apart(rows)
    grid = [row for row in searched if row["kind"] == "grid"]
    return "\n\n".join(
        [
            f"No pipeline was run. Times are a roofline's of the {_DEVICE.name}{_measured(rows)}, idle time is the "
            "simulator's, memory is counted (`megatron/schedules/estimate`). The model has no stragglers and no "
            "contention, so it is kinder to every method than a cluster. Its links are as fast as they can be, so 1F1B "
            "can avoid its bubble by tensor parallelism.",
            "### Equal microbatches",
            "One sample of 1024 tokens per microbatch, one GPU per pipeline rank, three models, n = 2d, 4d and 8d. "
            "`adaptive 3/4` plans within that part of 1F1B's memory.",
            "![Throughput against memory](images/tables.svg)",
            _equal_table(equal),
            "### Grid search",
            f"98.5B on {_GPUS} GPUs, {_BATCH} samples per iteration, FlashAttention, sequence parallelism, distributed "
            "optimizer: MFU of the fastest setting of each method that fits (data/tensor/pipeline sizes), in "
            f"{100 * usable(1.0):.0f} % of a GPU. "
            f"A GPU copies {_DEVICE.host_link / 1e9:g} GB/s each way; a node's host has "
            f"{_DEVICE.host_memory / 1e12:g} TB.",
            _grid_table(grid),
            *(_with_saving(these) for these in _by(grid, "sequence_length").values()),
        ]
    ).rstrip()


def _apart(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    searched = [row for row in rows if row["kind"] in ("grid", "slower links")]
    return [row for row in rows if row["kind"] == "equal"], searched


def _measured(rows: Sequence[Row]) -> str:
    profile = next((row for row in rows if row["kind"] == "profile"), None)
    if profile is None:
        return ""
    factors = ", ".join(f"{factor:.2f}" for factor in profile["correction"])
    return f", those of a layer times {factors} (F, I, W) as measured on {profile['measured_on']}"


def _best_of_ours(found: Sequence[Row]) -> tuple[float | None, str]:
    """Returns how much faster our best is than the best 1F1B, and in words."""
    fitting = {row["method"]: row for row in found if row["mfu"]}
    ours = max((row for name, row in fitting.items() if name in _OURS), key=lambda row: row["mfu"], default=None)
    theirs = max(
        (row for name, row in fitting.items() if name.startswith("1F1B")), key=lambda r: r["mfu"], default=None
    )
    if ours is None or theirs is None:
        return None, "nothing fits to compare"
    gain = ours["mfu"] / theirs["mfu"]
    return gain, f"{ours['method']} {_percent(gain)} above {theirs['method']}"


def _with_saving(found: Sequence[Row]) -> str:
    """Returns the gain of recompute and offload over our best without them."""
    fitting = {row["method"]: row["mfu"] for row in found if row["mfu"]}
    without = max((mfu for name, mfu in fitting.items() if name in _OURS), default=None)
    with_it = [name for name in _SAVING_NAMES if name in fitting]
    if not with_it or without is None:
        return ""
    best = max(with_it, key=lambda name: fitting[name])
    return (
        f"At {found[0]['sequence_length']} tokens {best} reaches {100 * fitting[best]:.1f} % MFU, "
        f"{_percent(fitting[best] / without)} above the best of ours without either."
    )


def _ratios(rows: Sequence[Row], what: str) -> dict[str, list[float]]:
    """Returns each method's figure over 1F1B's, for every model and number of microbatches."""
    found = defaultdict(list)
    baseline = {(row["model"], row["microbatches"]): row[what] for row in rows if row["method"] == "1F1B"}
    for row in rows:
        found[row["method"]].append(row[what] / baseline[row["model"], row["microbatches"]])
    return found


def _by(rows: Sequence[Row], key: str) -> dict[object, list[Row]]:
    found: dict[object, list[Row]] = defaultdict(list)
    for row in rows:
        found[row[key]].append(row)
    return found


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f} %"


def _equal_table(rows: Sequence[Row]) -> str:
    """Returns a line for each method, with the range over all models and numbers of microbatches."""
    by_method = _by(rows, "method")
    faster, memory = _ratios(rows, "mfu"), _ratios(rows, "activations_gib")
    table = []
    for method in sorted(by_method, key=lambda name: str(name).startswith("adaptive")):
        bubble = span([100 * row["bubble"] for row in by_method[method]], ".1f")
        ratios = [span(each[str(method)], ".3f") for each in (faster, memory)]
        table.append([str(method), ratios[0], f"{bubble} %", ratios[1]])
    return markdown_table(["", "throughput over 1F1B", "bubble", "activations over 1F1B's"], table).strip()


def _grid_table(rows: Sequence[Row]) -> str:
    """Returns a line for each method, a column for each sequence length."""
    lengths = list(_by(rows, "sequence_length"))
    found = {(row["method"], row["sequence_length"]): row for row in rows}
    table = []
    for method in _by(rows, "method"):
        at = [found.get((method, length)) for length in lengths]
        table.append([str(method), *(_grid_cell(row) if row else "" for row in at)])
    return markdown_table(["", *(f"{length} tokens" for length in lengths)], table).strip()


def _grid_cell(row: Row) -> str:
    if not row["mfu"]:
        return "does not fit"
    extra = [f"{100 * row['recomputed']:.1f} % recomputed"] if row["recomputed"] else []
    extra += [f"{row['host_gib']:.0f} GiB on a host"] if row["host_gib"] else []
    sizes = f"{row['data']}/{row['tensor']}/{row['pipeline']}"
    return f"{100 * row['mfu']:.1f} % ({', '.join([sizes, *extra])})"


def drawing(rows: Sequence[Row]) -> str:
    """Draws throughput against memory, a panel for each model: a line from few to many microbatches for each method."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "tables"  # the same picture from the same rows
    from matplotlib import pyplot

    models = _by([row for row in rows if row["kind"] == "equal"], "model")
    figure, panels = pyplot.subplots(1, len(models), figsize=(4.2 * len(models), 3.8), squeeze=False)
    for panel, (model, found) in zip(panels[0], models.items(), strict=True):
        for method, points in _by(found, "method").items():
            memory = [row["activations_gib"] for row in points]
            panel.plot(memory, [100 * row["mfu"] for row in points], marker="o", label=method)
        panel.set(title=f"{model} on {found[0]['pipeline']} GPUs", xlabel="activations, GiB on the fullest GPU")
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("MFU, %; upward: more microbatches")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="lower center", ncols=4, frameon=False)
    figure.tight_layout(rect=(0, 0.14, 1, 1))
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    pyplot.close(figure)
    return text.getvalue()


PART = Part("tables", "The paper's comparisons, estimated", measure, claims, section, drawing)
