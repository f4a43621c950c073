"""Searches the fastest settings of Megatron-Bridge's recipes, of stock and of ours, and writes docs/retuned.md.

RECIPES are names of Megatron-Bridge's performance recipes. Needs no GPU.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import click

from benchmarks.retune.page import as_page, pair
from benchmarks.retune.retuned import Retuned
from megatron.schedules.cli.ending import emit, run
from megatron.schedules.report.progress_bar import shown
from megatron.schedules.utils.child_processes import worker_pool
from megatron.schedules.utils.errors import PlanError
from tools._answers import answers
from tools._methods import ADAPTIVE, METHODS
from tools._start import of_recipe

RECIPES = Path(__file__).parents[2] / "docs" / "recipes.json"


@click.command(help=__doc__)
@click.argument("recipes", nargs=-1)
@click.option("--bridge", "folder", type=click.Path(path_type=Path), help="Unpacked wheel of megatron-bridge.")
@click.option("--jobs", type=click.IntRange(1, 1024), default=2, show_default=True, help="Processes to search in.")
@click.option("--json", "output", type=click.Path(path_type=Path), help="File for all results; those in it are kept.")
@click.option("--page", type=click.Path(path_type=Path), help="Markdown page of the results in --json.")
def main(recipes: Sequence[str], folder: Path | None, jobs: int, output: Path | None, page: Path | None) -> None:
    warnings.simplefilter("ignore")
    known = read(output) if output is not None and output.exists() else {}
    methods = (*METHODS, ADAPTIVE)
    for name in recipes:
        if folder is None:
            raise PlanError("--bridge is missing: the unpacked wheel of megatron-bridge, which has the recipes")
        start = of_recipe(name, folder)
        with worker_pool(jobs) as pool, shown(name, sys.stderr) as progress:
            retuned = Retuned.of(*answers(pool, [start], methods, 1, jobs, progress))
        known[retuned.name] = retuned
        click.echo(f"{name}: {retuned.over_own} of NVIDIA's setting, {retuned.over_stock} of the best of stock's")
        if output is not None:
            emit(as_json(known.values()), output)
    if page is not None:
        emit(as_page(list(known.values()), pairs()), page)


def pairs() -> set[tuple[str, str]]:
    """Returns the models and GPUs in docs/recipes.json."""
    found = {pair(each["name"], each["device"]) for each in json.loads(RECIPES.read_text())}
    return {(model, device) for model, device in found if not model.endswith("_config")}


def read(file: Path) -> dict[str, Retuned]:
    """Returns the results in a file that ``--json`` wrote, by recipe."""
    return {each["name"]: Retuned.read(each) for each in json.loads(file.read_text())}


def as_json(results: Iterable[Retuned]) -> str:
    """Returns the text of such a file."""
    return json.dumps([asdict(each) for each in sorted(results, key=lambda each: each.name)], indent=1) + "\n"


if __name__ == "__main__":
    sys.exit(run(main, "retune"))
