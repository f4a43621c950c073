"""Dry-runs recipes: says whether a schedule of ours is accepted, and plans it and auto next to stock's schedule.

RECIPES are names of Megatron-Bridge's performance recipes (without names all with pipeline parallelism), or scripts
with Megatron-LM's flags. Needs no GPU.
"""

from __future__ import annotations

import itertools
import json
import sys
import warnings
from argparse import Namespace
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import click

from benchmarks.recipes import arguments, bridge
from benchmarks.recipes.answer import SEARCH_SECONDS, TRIED, Answer, answer, with_acceptance
from benchmarks.recipes.page import as_page, as_text
from megatron.schedules.cli.ending import emit, run
from megatron.schedules.estimate.devices import GIB, SHORT
from megatron.schedules.planner.registry import AUTO, NAMES
from megatron.schedules.utils.errors import PlanError

# Memory of each GPU by its data sheet, GiB.
_NAMED = [name for name in NAMES if name not in (AUTO, "adaptive", "file")]


@click.command(help=__doc__)
@click.argument("recipes", nargs=-1)
@click.option("--bridge", "folder", type=click.Path(path_type=Path), help="Unpacked wheel of megatron-bridge.")
@click.option("--gpus", type=click.IntRange(2, 10_000_000), help="GPUs of a script.")
@click.option("--device", type=click.Choice(list(SHORT)), default="H100", show_default=True, help="GPU of a script.")
@click.option(
    "--schedule",
    type=click.Choice(_NAMED),
    multiple=True,
    default=TRIED,
    show_default=True,
    help="Our schedules; the first that fits counts.",
)
@click.option(
    "--search-seconds",
    "seconds",
    type=click.FloatRange(min=0),
    default=SEARCH_SECONDS,
    show_default=True,
    help="Time of each search of auto on a typical core, which plans each recipe too; 0 leaves it out.",
)
@click.option(
    "--acceptance",
    is_flag=True,
    help="Only ask again which settings of the recipes in --json have to be left out. Their plans stay.",
)
@click.option(
    "--plans",
    is_flag=True,
    help="Only plan the recipes in --json again. Their settings to leave out stay.",
)
@click.option("--json", "output", type=click.Path(path_type=Path), help="File for all answers; those in it are kept.")
@click.option("--page", type=click.Path(path_type=Path), help="Markdown page of the answers in --json.")
def main(
    recipes: Sequence[str],
    folder: Path | None,
    gpus: int | None,
    device: str,
    schedule: Sequence[str],
    seconds: float,
    acceptance: bool,
    plans: bool,
    output: Path | None,
    page: Path | None,
) -> None:
    warnings.simplefilter("ignore")
    known = read(output) if output is not None and output.exists() else {}
    scripts = [each for each in recipes if Path(each).is_file()]
    names = [each for each in recipes if each not in scripts]
    if scripts and gpus is None:
        raise PlanError(f"--gpus is missing: the GPUs of {scripts[0]}")
    if names and folder is None:
        raise PlanError(f"--bridge is missing: the unpacked wheel of megatron-bridge, which has {names[0]}")
    if (acceptance or plans) and not known:
        flag = "--acceptance" if acceptance else "--plans"
        raise PlanError(f"{flag} needs the recipes' plans: name their file with --json")
    asked = [(each, arguments.of_script(Path(each), gpus or 1), device) for each in scripts]
    done = {name for name, each in known.items() if each.ours is None or each.auto is not None or not seconds}
    of_bridge = iter(()) if folder is None else _of_bridge(folder, names or sorted(known) * (acceptance or plans), done)
    for name, args, gpu in itertools.chain(asked, of_bridge):
        before = known.get(name)
        if acceptance and before is not None:
            known[name] = with_acceptance(before, args)
        else:
            known[name] = answer(name, args, gpu, SHORT[gpu].memory / GIB, schedule, seconds, before if plans else None)
        click.echo(as_text(known[name]))
        if output is not None:
            emit(as_json(known.values()), output)
    if page is not None:
        emit(as_page(list(known.values())), page)


def read(file: Path) -> dict[str, Answer]:
    """Returns the answers in a file that ``--json`` wrote, by name."""
    return {each["name"]: Answer.of(each) for each in json.loads(file.read_text())}


def as_json(answers: Iterable[Answer]) -> str:
    """Returns the text of such a file."""
    return json.dumps([asdict(each) for each in sorted(answers, key=lambda each: each.name)], indent=1) + "\n"


def _of_bridge(folder: Path, names: Sequence[str], known: Container[str]) -> Iterator[tuple[str, Namespace, str]]:
    """Yields name, arguments and GPU of each recipe in ``names``; without names, of all new ones with a pipeline."""
    found = bridge.recipes(folder)
    for name in names or sorted(name for name in found if name not in known and bridge.NAME.search(name)):
        if name not in found or bridge.NAME.search(name) is None:
            raise PlanError(f"{folder} has no performance recipe {name}")
        try:
            config = bridge.called(found[name])
        except Exception as error:  # whatever Bridge raises
            if names:
                raise PlanError(f"Megatron-Bridge cannot make {name}: {error}") from None
            click.echo(f"left out: Megatron-Bridge cannot make {name}: {error}", err=True)
            continue
        if names or config.model.pipeline_model_parallel_size > 1:
            gpus, device = bridge.gpus_of(name)
            yield name, arguments.of_container(config, gpus), device


if __name__ == "__main__":
    sys.exit(run(main, "recipes"))
