#!/usr/bin/env python3
"""Search data, tensor and pipeline parallel sizes, microbatch sizes and schedules for the fastest training that fits.

Needs no GPU. Times of passes come from a roofline of the GPU, which a measured cost profile can correct; iteration
times come from the planner, and memory from arithmetic.
"""

from __future__ import annotations

import csv
import io
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import as_completed
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import click

from megatron.schedules.cli.ending import emit, run
from megatron.schedules.estimate.bounds import BOUNDS
from megatron.schedules.estimate.device_memory import usable
from megatron.schedules.estimate.devices import DEVICES, GIB
from megatron.schedules.estimate.models import MODELS, find_model
from megatron.schedules.estimate.roofline import corrections
from megatron.schedules.estimate.times import ONES
from megatron.schedules.measure.cost_file import read_profile
from megatron.schedules.report.progress_bar import shown
from megatron.schedules.report.table import aligned, markdown
from megatron.schedules.utils.child_processes import worker_pool
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.output_files import objection
from tools._grid import Found, Question, Short, fastest, search
from tools._iteration import Estimate
from tools._methods import ADAPTIVE, METHODS, SAVING
from tools._run_settings import gpus_here, run_setting

# All divisors of the GPUs are tried, and plans made for up to so many microbatches. More is a typing error.
_MOST_GPUS, _MOST_SAMPLES = 1_000_000, 100_000
_METHODS = (*METHODS, ADAPTIVE, *SAVING)
_HEADS = (
    ("method", ""),
    ("MFU", ""),
    ("throughput", "to 1F1B's"),
    ("DP", ""),
    ("TP", ""),
    ("PP", ""),
    ("micro", "batch"),
    ("n", ""),
    ("bubble", ""),
    ("memory", "GiB"),
    ("activations", "GiB"),
)
# Columns for methods that may recompute or offload: share of the computing, and GiB on the host of a node.
_SAVING_HEADS = (("recomputed", "of computing"), ("host", "GiB"))
# Columns for models whose experts' messages weight gradients may hide: shares of the pipeline's time.
_MESSAGES_HEADS = (("messages", "hidden"), ("messages", "exposed"))


class Answer(NamedTuple):
    """Results of all methods for one batch size."""

    question: Question
    found: list[Found]


def search_all(
    questions: Sequence[Question], names: Sequence[str], top: int, jobs: int, *, shared: bool = False
) -> list[Answer]:
    """Searches every method for every question in ``jobs`` processes, with progress on standard error.

    With ``shared`` each method also with vocabulary parallelism.
    """
    methods = [method for method in _METHODS if method.name in names]
    if shared:
        methods += [method.sharing() for method in methods]
    found: dict[tuple[int, str], Found] = {}
    with worker_pool(jobs) as pool, shown("grid search", sys.stderr) as progress:
        futures = {
            pool.submit(search, question, method, top): (at, method.name)
            for at, question in enumerate(questions)
            for method in sorted(methods, key=lambda method: method.schedule != ADAPTIVE.schedule)  # the longest first
        }
        for future in as_completed(futures):
            found[futures[future]] = future.result()
            progress(1 / len(futures))
    return [Answer(question, [found[at, method.name] for method in methods]) for at, question in enumerate(questions)]


def as_text(answers: Iterable[Answer]) -> str:
    """Writes a table for each question."""
    return "\n".join(
        "\n".join([_title(each.question), aligned(_heads(each), _rows(each)), *_why(each), *_pasted(each), ""])
        for each in answers
    )


def as_markdown(answers: Iterable[Answer]) -> str:
    """Writes the same in Markdown."""
    return "\n".join(
        f"**{_title(each.question)}**\n\n{markdown(_heads(each), _rows(each))}\n"
        + "".join(f"- {line}\n" for line in (*_why(each), *_pasted(each)))
        for each in answers
    )


def as_csv(answers: Iterable[Answer]) -> str:
    """Writes one row a setting, the fastest first, with its flags for ``pretrain_gpt.py``."""
    text = io.StringIO()
    records = [_record(each) for answer in answers for each in fastest(answer.found)]
    writer = csv.DictWriter(text, list(_COLUMNS), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


_COLUMNS: dict[str, Callable[[Estimate], object]] = {
    "method": lambda each: each.setting.method.name,
    "data": lambda each: each.setting.data,
    "tensor": lambda each: each.setting.tensor,
    "pipeline": lambda each: each.setting.pipeline,
    "micro_batch_size": lambda each: each.setting.micro_batch,
    "global_batch_size": lambda each: each.setting.global_batch,
    "sequence_length": lambda each: each.setting.model.sequence,
    "microbatches": lambda each: each.setting.microbatches,
    "mfu": lambda each: round(each.mfu, 5),
    "bubble": lambda each: round(each.bubble, 5),
    "memory_gib": lambda each: round(each.memory / GIB, 3),
    "recomputed": lambda each: round(each.recomputed, 5),
    "messages_hidden": lambda each: round(each.messages[0], 5),
    "messages_exposed": lambda each: round(each.messages[1], 5),
    "host_gib": lambda each: round(each.host / GIB, 1),
    "iteration_seconds": lambda each: round(each.seconds, 5),
    "flags": lambda each: each.setting.flags,
}


def _record(each: Estimate) -> dict[str, object]:
    return {name: value(each) for name, value in _COLUMNS.items()}


def _heads(answer: Answer) -> tuple[tuple[str, str], ...]:
    return (*_HEADS, *(_SAVING_HEADS if _saves(answer) else ()), *(_MESSAGES_HEADS if _waits(answer) else ()))


def _saves(answer: Answer) -> bool:
    return any(found.method.saves_memory for found in answer.found)


def _waits(answer: Answer) -> bool:
    return any(any(each.messages) for found in answer.found for each in found.best)


def _rows(answer: Answer) -> list[list[str]]:
    more = len(_heads(answer)) - len(_HEADS)
    baseline = next((found.best[0].mfu for found in answer.found if found.method.name == "1F1B" and found.best), None)
    rows = []
    for found in answer.found:
        if not found.best:
            least = f"{found.short.memory / GIB:.1f}" if found.short else ""
            why = "does not fit" if found.short else "no sizes go with it"
            rows.append([found.method.name, why, *[""] * (len(_HEADS) - 4), least, *[""] * (1 + more)])
        for each in found.best:
            at = each.setting
            ratio = f"{each.mfu / baseline:.3f}" if baseline else ""
            sizes = (at.data, at.tensor, at.pipeline, at.micro_batch, at.microbatches)
            memory = [f"{bytes_held / GIB:.1f}" for bytes_held in (each.memory, each.activations)]
            shares = [f"{100 * each.mfu:.1f} %", ratio]
            saved = [f"{100 * each.recomputed:.1f} %", f"{each.host / GIB:.0f}"] if _saves(answer) else []
            saved += [f"{100 * share:.1f} %" for share in each.messages] if _waits(answer) else []
            rows.append([found.method.name, *shares, *map(str, sizes), f"{100 * each.bubble:.1f} %", *memory, *saved])
    return rows


def _why(answer: Answer) -> Iterator[str]:
    """Says for each method that does not fit which memory is too large, and what would help."""
    room = usable(answer.question.device.memory)
    fitting = [found.method.name for found in answer.found if found.best]
    for found in answer.found:
        name, short = found.method.name, found.short
        if found.best:
            continue
        if short is None:
            yield f"{name}: no parallel sizes go with this model, batch size and number of GPUs"
            continue
        at, held = short.setting, short.held
        sizes = f"DP {at.data}, TP {at.tensor}, PP {at.pipeline}, micro batch {at.micro_batch}"
        least = "" if short.planned else "at least "
        parts = ", ".join(f"{part} {size / GIB:.1f}" for part, size in held.parts.items())
        said = f"{name}: needs least with {sizes}; there rank {short.rank} holds {least}{held.device / GIB:.1f} GiB of "
        yield f"{said}{room / GIB:.1f} GiB ({parts}), most of it {held.largest}; {_helps(found, short, fitting)}"


def _helps(found: Found, short: Short, fitting: Sequence[str]) -> str:
    """Says what would make a method fit, or which one fits."""
    helps = f"{short.gpus * short.setting.gpus} GPUs do" if short.gpus else "16 times as many GPUs do not help"
    if fitting:
        helps += f"; {', '.join(fitting)} {'fits' if len(fitting) == 1 else 'fit'}"
    elif not found.method.saves_memory and short.held.largest == "activations":
        helps += "; try --save-memory or shorter samples"
    return helps


def _pasted(answer: Answer) -> Iterator[str]:
    """Flags of the fastest setting of all methods."""
    for each in fastest(answer.found)[:1]:
        yield f"fastest, {each.setting.method.name}: {each.setting.flags}"


def _title(question: Question) -> str:
    model = question.model
    return (
        f"{model.name} on {question.gpus} {question.device.name}, sequence length {model.sequence}, "
        f"batch size {question.global_batch}"
    )


_FORMS = {"text": as_text, "markdown": as_markdown, "csv": as_csv}


def _finite(context: click.Context, option: click.Parameter, value: float | None) -> float | None:
    """Refuses numbers that are not finite, which click's range allows."""
    if value is not None and not math.isfinite(value):
        raise click.BadParameter(f"{value} is not a finite number.", context, option)
    return value


# The flag of each part of a request.
FLAGS = {"costs_file": "--costs-file", "model": "--model"}


@click.command(help=__doc__)
@click.option(
    "--model",
    metavar="NAME|FILE",
    required=True,
    help=f"One of {', '.join(MODELS)}, or a file with Megatron's flags, such as your script. Flags behind it are "
    "added. Parallel sizes, batch sizes and schedule are searched; all else, such as experts, context parallelism and "
    "recompute, stays.",
)
@click.option("--gpus", type=click.IntRange(2, _MOST_GPUS), required=True, help="Number of GPUs; all are used.")
@click.option(
    "--sequence-length",
    type=click.IntRange(*BOUNDS["--seq-length"]),
    help="Tokens of a sample; the model's without it (1024 for the paper's).",
)
@click.option(
    "--batch-size",
    type=click.IntRange(1, _MOST_SAMPLES),
    multiple=True,
    required=True,
    help="Samples of an iteration. Give it several times for several tables.",
)
@click.option("--device", type=click.Choice(list(DEVICES)), default="A100-80GB", show_default=True, help="The GPU.")
@click.option(
    "--memory",
    type=click.FloatRange(1.0),
    callback=_finite,
    metavar="GIB",
    help="Its memory, if yours has another.",
)
@click.option(
    "--method",
    "methods",
    type=click.Choice([method.name for method in _METHODS], case_sensitive=False),
    multiple=True,
    help="Search only this method; may be given several times. Without it all but those with recompute or offload.",
)
@click.option(
    "--save-memory",
    is_flag=True,
    help="Also search with recompute, with offload and with both, chosen for each setting; takes minutes a table.",
)
@click.option(
    "--offload-gbps",
    type=click.FloatRange(0, min_open=True),
    callback=_finite,
    metavar="GB/S",
    help="Copy speed of a GPU to its host while it copies as much back and all GPUs of the node do so. Without it that "
    "of --costs-file (of one GPU alone), or 12.5 for an A100 and 25 for an H100: 16 lanes of PCIe 4 and 5 at four "
    "fifths of their speed, shared by two GPUs.",
)
@click.option(
    "--host-memory",
    type=click.FloatRange(0, min_open=True),
    callback=_finite,
    metavar="GIB",
    help="Host memory of a node for offloaded activations; 2 TB without it.",
)
@click.option(
    "--vocabulary-parallel",
    is_flag=True,
    help="Search each method also with vocabulary parallelism.",
)
@click.option(
    "--top", type=click.IntRange(1, 1000), default=1, show_default=True, help="Number of settings of each method."
)
@click.option(
    "--costs-file",
    type=click.Path(path_type=Path),
    help="A cost profile measured by tools/profile_passes.py on this device; it corrects the roofline.",
)
@click.option("--jobs", type=click.IntRange(1, 1024), default=2, show_default=True, help="Processes to search in.")
@click.option(
    "--format",
    "form",
    type=click.Choice(list(_FORMS)),
    default="text",
    show_default=True,
    help="csv has the flags too.",
)
@click.option("--output", type=click.Path(path_type=Path), help="A file to write to, instead of standard output.")
@click.option(
    "--validate",
    is_flag=True,
    help="Also run each setting found with pretrain_gpt.py on this machine's GPUs, and print the measured time. On a "
    "cluster use examples/slurm/sweep.sh.",
)
def main(
    model: str,
    gpus: int,
    sequence_length: int | None,
    batch_size: Sequence[int],
    device: str,
    memory: float | None,
    methods: Sequence[str],
    save_memory: bool,
    offload_gbps: float | None,
    host_memory: float | None,
    vocabulary_parallel: bool,
    top: int,
    costs_file: Path | None,
    jobs: int,
    form: str,
    output: Path | None,
    validate: bool,
) -> None:
    if validate and gpus_here() < gpus:
        raise PlanError(
            f"--validate runs on {gpus} GPUs of this machine, which has {gpus_here()}: use examples/slurm/sweep.sh on "
            "a cluster, or leave the flag out"
        )
    if output is not None and (why := objection(output)):
        raise PlanError(f"--output: cannot write {output}: {why}")
    gpu = DEVICES[device] if memory is None else replace(DEVICES[device], memory=memory * GIB)
    gpu = gpu if host_memory is None else replace(gpu, host_memory=host_memory * GIB)
    trained = find_model(model) if sequence_length is None else find_model(model).of_length(sequence_length)
    correction, link = ONES, None if offload_gbps is None else offload_gbps * 1e9
    if costs_file is not None:
        profile = read_profile(costs_file)
        correction = corrections(profile, gpu, trained)
        if link is None and profile.copy_gbps is not None:
            link = profile.copy_gbps.both_ways * 1e9
    gpu = gpu if link is None else replace(gpu, host_link=link)
    questions = [Question(trained, gpu, gpus, batch, correction) for batch in batch_size]
    usual = methods or [method.name for method in _METHODS if not method.saves_memory]
    names = [*usual, *(method.name for method in SAVING if save_memory)]
    answers = search_all(questions, names, top, jobs, shared=vocabulary_parallel)
    text = _FORMS[form](answers)
    emit(text, output)
    if validate:
        _validate([each for answer in answers for each in fastest(answer.found)])


def _validate(settings: Sequence[Estimate]) -> None:
    """Runs each setting and prints its measured and its estimated time."""
    for number, each in enumerate(settings):
        folder = Path(".benchmark/validate") / str(number)
        outcome = run_setting(each.setting, folder)
        measured = f"{outcome.seconds:.3f} s" if outcome.seconds else f"{outcome.status}, see {folder}"
        click.echo(f"{each.setting.method.name}: {each.seconds:.3f} s an iteration estimated, {measured} measured")


if __name__ == "__main__":
    sys.exit(run(main, "grid_search", flags=FLAGS))
