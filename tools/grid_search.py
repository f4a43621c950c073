#!/usr/bin/env python3
"""Search parallel sizes, microbatch sizes, recompute and schedules for the fastest training that fits.

Needs no GPU. Prints the best settings beside your own and beside the best that stock Megatron has. Times of passes come
from a roofline of the GPU, which a measured cost profile can correct; iteration times come from the planner, and memory
from arithmetic.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click

from megatron.schedules.cli.ending import emit, run
from megatron.schedules.estimate.bounds import BOUNDS
from megatron.schedules.estimate.devices import DEVICES, GIB, Device
from megatron.schedules.estimate.models import MODELS
from megatron.schedules.estimate.roofline import corrections
from megatron.schedules.estimate.times import ONES, PassTimes
from megatron.schedules.measure.cost_file import read_profile
from megatron.schedules.report.progress_bar import shown
from megatron.schedules.utils.child_processes import worker_pool
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.output_files import objection
from tools._answers import answers
from tools._grid import fastest
from tools._iteration import Estimate
from tools._methods import ADAPTIVE, METHODS, SAVING
from tools._run_settings import gpus_here, run_setting
from tools._start import Start, of_model, of_recipe
from tools._tables import FORMS

# All divisors of the GPUs are tried, and plans made for up to so many microbatches. More is a typing error.
_MOST_GPUS, _MOST_SAMPLES = 1_000_000, 100_000
_METHODS = (*METHODS, ADAPTIVE, *SAVING)


def _finite(context: click.Context, option: click.Parameter, value: float | None) -> float | None:
    """Refuses numbers that are not finite, which click's range allows."""
    if value is not None and not math.isfinite(value):
        raise click.BadParameter(f"{value} is not a finite number.", context, option)
    return value


# The flag of each part of a request.
FLAGS = {"costs_file": "--costs-file", "model": "--model", "recipe": "--recipe"}


@click.command(help=__doc__)
@click.option(
    "--model",
    metavar="NAME|FILE",
    help=f"One of {', '.join(MODELS)}, or a file with Megatron's flags, such as your script. Flags behind it are "
    "added. Parallel sizes, microbatch size, recompute and schedule are searched; all else, such as FP8, stays.",
)
@click.option("--recipe", metavar="NAME", help="A performance recipe of Megatron-Bridge, instead of --model.")
@click.option(
    "--bridge",
    "folder",
    type=Path,
    help="Unpacked wheel of megatron-bridge, which has the recipe (docs/recipes.md).",
)
@click.option(
    "--gpus", type=click.IntRange(2, _MOST_GPUS), help="Number of GPUs; all are used. The recipe's without it."
)
@click.option(
    "--sequence-length",
    type=click.IntRange(*BOUNDS["--seq-length"]),
    help="Tokens of a sample; the model's without it (1024 for the paper's).",
)
@click.option(
    "--batch-size",
    type=click.IntRange(1, _MOST_SAMPLES),
    multiple=True,
    help="Samples of an iteration; the recipe's without it. Give it several times for several tables.",
)
@click.option(
    "--device", type=click.Choice(list(DEVICES)), help="The GPU. Without it the recipe's, or A100-80GB for a model."
)
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
    help="Search only this method; may be given several times. Without it all that plan no recompute or offload.",
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
    type=Path,
    help="A cost profile measured by tools/profile_passes.py on this device; it corrects the roofline.",
)
@click.option("--jobs", type=click.IntRange(1, 1024), default=2, show_default=True, help="Processes to search in.")
@click.option(
    "--format",
    "form",
    type=click.Choice(list(FORMS)),
    default="text",
    show_default=True,
    help="csv has the flags too.",
)
@click.option("--output", type=Path, help="A file to write to, instead of standard output.")
@click.option(
    "--validate",
    is_flag=True,
    help="Also run each setting found with pretrain_gpt.py on this machine's GPUs, and print the measured time. On a "
    "cluster use examples/slurm/sweep.sh.",
)
def main(
    model: str | None,
    recipe: str | None,
    folder: Path | None,
    gpus: int | None,
    sequence_length: int | None,
    batch_size: Sequence[int],
    device: str | None,
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
    if (model is None) == (recipe is None):
        raise PlanError("give --model or --recipe, one of them")
    if model is not None and (gpus is None or not batch_size):
        raise PlanError(f"{'--batch-size' if gpus else '--gpus'} is missing: a model does not say it")
    if recipe is not None and (folder is None or sequence_length is not None):
        missing = "--bridge is missing: the unpacked wheel of megatron-bridge, which has it"
        raise PlanError(missing if folder is None else "--sequence-length: a recipe has its own")
    if validate and (recipe is not None or (gpus is not None and gpus_here() < gpus)):
        raise PlanError(
            f"--validate runs on {gpus} GPUs of this machine, which has {gpus_here()}: use examples/slurm/sweep.sh on "
            "a cluster, or leave the flag out"
            if recipe is None
            else "--validate runs pretrain_gpt.py, which reads no recipe: leave it out"
        )
    if output is not None and (why := objection(output)):
        raise PlanError(f"--output: cannot write {output}: {why}")
    if recipe is not None and folder is not None:
        gpu = None if device is None else DEVICES[device]
        batches: Sequence[int | None] = batch_size or [None]
        starts = [of_recipe(recipe, folder, gpu, gpus, batch) for batch in batches]
    else:
        on = DEVICES[device or "A100-80GB"]
        starts = [of_model(model or "", on, gpus or 2, batch, sequence_length) for batch in batch_size]
    starts = [_on_device(start, memory, host_memory, offload_gbps, costs_file) for start in starts]
    usual = [name.lower() for name in methods] or [each.name.lower() for each in _METHODS if not each.saves_memory]
    names = [*usual, *(method.name.lower() for method in SAVING if save_memory)]
    searched = [method for method in _METHODS if method.name.lower() in names]
    searched += [method.sharing() for method in searched] if vocabulary_parallel else []
    with worker_pool(jobs) as pool, shown("grid search", sys.stderr) as progress:
        found = answers(pool, starts, searched, top, jobs, progress)
    emit(FORMS[form](found), output)
    if validate:
        _validate([each for answer in found for each in fastest(answer.found)])


def _on_device(
    start: Start, memory: float | None, host_memory: float | None, gbps: float | None, costs_file: Path | None
) -> Start:
    """Returns the search on a GPU with what flags say of it."""
    question = start.question
    gpu: Device = question.device
    correction: PassTimes = ONES
    gpu = gpu if memory is None else replace(gpu, memory=memory * GIB)
    gpu = gpu if host_memory is None else replace(gpu, host_memory=host_memory * GIB)
    link = None if gbps is None else gbps * 1e9
    if costs_file is not None:
        profile = read_profile(costs_file)
        correction = corrections(profile, gpu, question.model)
        if link is None and profile.copy_gbps is not None:
            link = profile.copy_gbps.both_ways * 1e9
    gpu = gpu if link is None else replace(gpu, host_link=link)
    own = question.own and replace(question.own, device=gpu, correction=correction)
    return replace(start, question=replace(question, device=gpu, correction=correction, own=own))


def _validate(settings: Sequence[Estimate]) -> None:
    """Runs each setting and prints its measured and its estimated time."""
    for number, each in enumerate(settings):
        folder = Path(".benchmark/validate") / str(number)
        outcome = run_setting(each, folder)
        measured = f"{outcome.seconds:.3f} s" if outcome.seconds else f"{outcome.status}, see {folder}"
        click.echo(f"{each.setting.method.name}: {each.seconds:.3f} s an iteration estimated, {measured} measured")


if __name__ == "__main__":
    sys.exit(run(main, "grid_search", flags=FLAGS))
