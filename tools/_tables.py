"""Writes what a grid search found: as text, Markdown and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Sequence

from megatron.schedules.estimate.device_memory import usable
from megatron.schedules.estimate.devices import GIB
from megatron.schedules.report.table import aligned, markdown
from tools._answers import Answer
from tools._grid import Found, Short, fastest
from tools._iteration import Estimate
from tools._job_specs import MOST_WITH_A_LARGER_BUBBLE
from tools._pasted import flags, overrides
from tools._question import Question
from tools._setting import Setting

_HEADS = (
    ("method", ""),
    ("MFU", ""),
    ("speed", "of 1F1B's"),
    ("DP", ""),
    ("TP", ""),
    ("CP", ""),
    ("EP", ""),
    ("PP", ""),
    ("VP", ""),
    ("micro", "batch"),
    ("n", ""),
    ("recompute", ""),
    ("bubble", ""),
    ("memory", "GiB"),
    ("activations", "GiB"),
)
# Columns for methods that may recompute or offload: share of the computing, and GiB on the host of a node.
_SAVING_HEADS = (("recomputed", "of computing"), ("host", "GiB"))
# Columns for models whose experts' messages weight gradients may hide: shares of the pipeline's time.
_MESSAGES_HEADS = (("messages", "hidden"), ("messages", "exposed"))


def as_text(answers: Iterable[Answer]) -> str:
    """Writes a table for each question."""
    return "\n".join(
        "\n".join([_title(each.question), aligned(_heads(each), _rows(each)), *said(each), ""]) for each in answers
    )


def as_markdown(answers: Iterable[Answer]) -> str:
    """Writes the same in Markdown."""
    return "\n".join(
        f"**{_title(each.question)}**\n\n{markdown(_heads(each), _rows(each))}\n"
        + "".join(f"- {line}\n" for line in said(each))
        for each in answers
    )


def as_csv(answers: Iterable[Answer]) -> str:
    """Writes one row a setting, the fastest first, with its flags for ``pretrain_gpt.py``."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(_COLUMNS), lineterminator="\n")
    writer.writeheader()
    for answer in answers:
        for each in fastest(answer.found):
            writer.writerow({name: value(each) for name, value in _COLUMNS.items()})
    return text.getvalue()


_COLUMNS: dict[str, Callable[[Estimate], object]] = {
    "method": lambda each: each.setting.method.name,
    "data": lambda each: each.setting.data,
    "tensor": lambda each: each.setting.tensor,
    "context": lambda each: each.setting.context,
    "expert": lambda each: each.setting.expert,
    "pipeline": lambda each: each.setting.pipeline,
    "chunks": lambda each: each.setting.method.chunks,
    "micro_batch_size": lambda each: each.setting.micro_batch,
    "global_batch_size": lambda each: each.setting.global_batch,
    "sequence_length": lambda each: each.setting.model.sequence,
    "microbatches": lambda each: each.setting.microbatches,
    "recompute": lambda each: recompute_of(each.setting),
    "mfu": lambda each: round(each.mfu, 5),
    "bubble": lambda each: round(each.bubble, 5),
    "memory_gib": lambda each: round(each.memory / GIB, 3),
    "recomputed": lambda each: round(each.outcome.recomputed, 5),
    "messages_hidden": lambda each: round(each.outcome.messages[0], 5),
    "messages_exposed": lambda each: round(each.outcome.messages[1], 5),
    "host_gib": lambda each: round(each.host / GIB, 1),
    "iteration_seconds": lambda each: round(each.seconds, 5),
    "flags": flags,
}


def recompute_of(setting: Setting) -> str:
    """Returns what Megatron recomputes, in a word or two; empty for nothing."""
    again = setting.recompute
    return " ".join(again.modules or ("core_attn",)) if again.granularity == "selective" else again.granularity or ""


def sizes_of(setting: Setting) -> str:
    """Returns parallel and microbatch sizes, as ``TP2 EP8 PP4 VP3 MB1``; those of 1 are left out, but the last."""
    chunks = setting.method.chunks if setting.method.is_stock else 1
    sizes = {"TP": setting.tensor, "CP": setting.context, "EP": setting.expert, "PP": setting.pipeline, "VP": chunks}
    named = [f"{name}{size}" for name, size in sizes.items() if size > 1]
    return " ".join([*named, f"MB{setting.micro_batch}"])


def _heads(answer: Answer) -> tuple[tuple[str, str], ...]:
    base = "of yours" if answer.own else "of stock's"
    heads = (*_HEADS[:2], ("speed", base), *_HEADS[3:])
    return (*heads, *(_SAVING_HEADS if _saves(answer) else ()), *(_MESSAGES_HEADS if _waits(answer) else ()))


def _saves(answer: Answer) -> bool:
    return any(found.method.saves_memory for found in answer.found)


def _waits(answer: Answer) -> bool:
    return any(any(each.outcome.messages) for found in answer.found for each in found.best)


def _rows(answer: Answer) -> list[list[str]]:
    more = len(_heads(answer)) - len(_HEADS)
    rows = [_row(answer, "as set", answer.own)] if answer.own else []
    for found in answer.found:
        if not found.best:
            least = f"{found.short.memory / GIB:.1f}" if found.short else ""
            why = "none found" if found.is_cut else "does not fit" if found.short else "no sizes go with it"
            rows.append([found.method.name, why, *[""] * (len(_HEADS) - 4), least, *[""] * (1 + more)])
        rows += [_row(answer, found.method.name, each) for each in found.best]
    return rows


def _row(answer: Answer, name: str, each: Estimate) -> list[str]:
    at, base = each.setting, answer.own or answer.stock
    chunks = at.method.chunks if at.pipeline > 1 else 1
    sizes = (at.data, at.tensor, at.context, at.expert, at.pipeline, chunks, at.micro_batch, at.microbatches)
    memory = [f"{size / GIB:.1f}" for size in (each.memory, each.activations)]
    saved = [f"{100 * each.outcome.recomputed:.1f} %", f"{each.host / GIB:.0f}"] if _saves(answer) else []
    saved += [f"{100 * share:.1f} %" for share in each.outcome.messages] if _waits(answer) else []
    shares = [f"{100 * each.mfu:.1f} %", f"{base.seconds / each.seconds:.3f}" if base else ""]
    again = recompute_of(at) or "none"
    return [name, *shares, *map(str, sizes), again, f"{100 * each.bubble:.1f} %", *memory, *saved]


def said(answer: Answer) -> Iterator[str]:
    """Yields lines about what was found: the best of stock and of ours, what does not fit, and what is not known."""
    yield from _best(answer)
    yield from _why(answer)
    for found in answer.found:
        if found.gap:
            yield f"{found.method.name}: settings that were not planned might be up to {100 * found.gap:.0f} % faster"
    for argument, why in answer.start.left_out.items():
        yield f"our schedules lose {argument}: {why}"
    for what in answer.start.unknown:
        yield f"not counted: {what}"


def _best(answer: Answer) -> Iterator[str]:
    stock, ours, own = answer.stock, answer.ours, answer.own
    if stock is not None:
        over = f", {own.seconds / stock.seconds:.3f} of your setting's speed" if own else ""
        is_own = own is not None and stock is own
        yield f"best of stock: {'your setting' if is_own else _named(stock)}{over}{_pasted(answer, stock)}"
    if ours is not None:
        ratios = [
            f", {ratio:.3f} of {of}"
            for ratio, of in ((answer.over_own, "your setting's speed"), (answer.over_stock, "the best of stock's"))
            if ratio is not None
        ]
        yield f"best of ours: {_named(ours)}{''.join(ratios)}{_pasted(answer, ours)}"
    if ours is not None and answer.same is not None:
        most, same = 100 * MOST_WITH_A_LARGER_BUBBLE, answer.same
        yield (
            f"no more than {most:.0f} % is claimed over stock's {same.setting.choice.text} of the same sizes, whose "
            f"bubble of {100 * same.bubble:.1f} % is smaller"
        )


def _named(each: Estimate) -> str:
    return f"{each.setting.method.name}, {sizes_of(each.setting)}"


def _pasted(answer: Answer, each: Estimate) -> str:
    if answer.start.is_bridge:
        return ":\n" + overrides(each, frozenset(answer.start.left_out))
    return f": {flags(each)}"


def _why(answer: Answer) -> Iterator[str]:
    """Says for each method that does not fit which memory is too large, and what would help."""
    room = usable(answer.question.device.memory)
    fitting = [found.method.name for found in answer.found if found.best]
    for found in answer.found:
        name, short = found.method.name, found.short
        if found.best:
            continue
        if found.is_cut:
            yield f"{name}: none of the {found.tried} settings with the least bounds fits; others were not planned"
        if short is None:
            yield f"{name}: no parallel sizes go with this model, batch size and number of GPUs"
            continue
        at, held = short.setting, short.held
        sizes = f"DP {at.data}, TP {at.tensor}, PP {at.pipeline}, micro batch {at.micro_batch}"
        least = "" if short.planned else "at least "
        parts = ", ".join(f"{part} {size / GIB:.1f}" for part, size in held.parts.items())
        needs = (
            f"{name}: needs least with {sizes}; there rank {short.rank} holds {least}{held.device / GIB:.1f} GiB of "
        )
        yield f"{needs}{room / GIB:.1f} GiB ({parts}), most of it {held.largest}; {_helps(found, short, fitting)}"


def _helps(found: Found, short: Short, fitting: Sequence[str]) -> str:
    """Says what would make a method fit, or which one fits."""
    if fitting:
        return f"{', '.join(fitting)} {'fits' if len(fitting) == 1 else 'fit'}"
    helps = f"{short.gpus * short.setting.gpus} GPUs do" if short.gpus else "16 times as many GPUs do not help"
    if not found.method.saves_memory and short.held.largest == "activations":
        helps += "; try --save-memory or shorter samples"
    return helps


def _title(question: Question) -> str:
    model, quantized = question.model, question.model.whole.quantized
    peak = f"MFU of {question.device.peak(quantized) / 1e12:.0f} TFLOP/s"
    return (
        f"{model.name} on {question.gpus} {question.device.name}, sequence length {model.sequence}, "
        f"batch size {question.global_batch}, {quantized or 'bf16'}, {peak}"
    )


FORMS = {"text": as_text, "markdown": as_markdown, "csv": as_csv}
