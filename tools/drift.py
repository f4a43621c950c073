#!/usr/bin/env python3
"""Says what another version of Megatron or Transformer Engine changes of what this package relies on.

    python -m tools.drift 0.19.1                    megatron-core of that version, downloaded with pip
    python -m tools.drift ~/src/Megatron-LM         a checkout, or any folder with megatron/core or transformer_engine
    python -m tools.drift DIR --record tools/fingerprints      writes its fingerprints into this folder

Nothing of the other version is imported. Ends with 1 if something that is relied on is gone or no longer fits.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.schedules.cli.ending import run
from megatron.schedules.integration.touch_points import PATCHED, REPEATED
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.output_files import write_text
from megatron.schedules.utils.printable import printable_name
from tools._stock_names import Definition, Sources
from tools._touched import HOOKED, KINDS, REPEATED_KIND, Touch, by_name, touches

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "megatron" / "schedules"
FINGERPRINTS = ROOT / "tools" / "fingerprints"
_PACKAGES = {"megatron-core": ("megatron.core", "megatron.training"), "transformer-engine": ("transformer_engine",)}
_CONFIG = "megatron.core.transformer.transformer_config.TransformerConfig"

UNCHANGED, BODY, SIGNATURE, GONE, BROKEN = "unchanged", "body changed", "signature changed", "gone", "does not fit"


class Row(NamedTuple):
    """One name that is touched, and what became of it."""

    name: str
    state: str
    kinds: tuple[str, ...]
    where: tuple[str, ...]
    why: str = ""


@cache
def touched() -> Mapping[str, list[Touch]]:
    """Returns all names that the package touches, each with the places."""
    found = touches(PACKAGE)
    found += [Touch(each.name, "patched", f"integration/{each.where}") for each in PATCHED]
    found += [Touch(each.name, REPEATED_KIND, f"integration/{each.where}") for each in REPEATED]
    return by_name(found)


def rows(names: Mapping[str, Sequence[Touch]], sources: Sources, known: Mapping[str, Any]) -> list[Row]:
    """Compares ``names`` with ``sources``.

    Args:
        known: fingerprints of the version that this package was written for.
    """
    found = []
    for name, places in names.items():
        if not any(name.startswith(package) and sources.has(package) for package in sum(_PACKAGES.values(), ())):
            continue
        before, now = known["names"].get(name), sources.definition(name)
        why = next(chain(_hook_faults(places, sources), _repeated_faults(name, sources)), "")
        state = BROKEN if why else _state(before, now)
        kinds = tuple(kind for kind in KINDS if any(place.kind == kind for place in places))
        found.append(Row(name, state, kinds, tuple(dict.fromkeys(place.where for place in places)), why))
    return found


def _state(before: Sequence[str] | None, now: Definition | None) -> str:
    if before is None:  # it was missing there too, and is optional
        return UNCHANGED
    if now is None:
        return GONE
    if before[0] != now.signature:
        return SIGNATURE
    return UNCHANGED if before[1] == now.digest else BODY


def _hook_faults(places: Sequence[Touch], sources: Sources) -> Iterator[str]:
    """Yields why the replacement of a hook cannot be called as stock's function is."""
    for place in places:
        own = sources.parameters(place.name) if place.kind == HOOKED else None
        if own is None or place.accepts is None:
            continue
        positional = [each.arg for each in (*own.posonlyargs, *own.args)]
        most, keywords = place.accepts
        if most is not None and keywords is not None and len(positional) > most:
            yield f"takes {len(positional)} arguments, and its replacement {most}"
        unknown = [each.arg for each in own.kwonlyargs if keywords is not None and each.arg not in keywords]
        if unknown:
            yield f"takes {', '.join(unknown)}, which its replacement does not"


def _repeated_faults(name: str, sources: Sources) -> Iterator[str]:
    """Yields the parameters of a repeated function that are not understood here."""
    own = sources.parameters(name)
    for each in REPEATED:
        if each.name == name and own is not None:
            unknown = sorted(set(_parameters(own)) - each.knows)
            if unknown:
                yield f"takes {', '.join(unknown)}, which {each.where} does not know"


def _parameters(own: ast.arguments) -> Iterator[str]:
    yield from (each.arg for each in (*own.posonlyargs, *own.args, *own.kwonlyargs))


def fingerprints(names: Mapping[str, Sequence[Touch]], sources: Sources, packages: Sequence[str]) -> dict[str, Any]:
    """Returns what is known of one version: its names, and for megatron-core its settings and flags."""
    defined = {name: sources.definition(name) for name in names if name.startswith(tuple(packages))}
    made: dict[str, Any] = {
        "version": sources.version,
        "names": {name: list(found) for name, found in defined.items() if found is not None},
    }
    if "megatron.core" in packages:
        made |= {"settings": sources.fields(_CONFIG), "flags": sources.flags("megatron.training")}
    return made


def known_of(project: str) -> dict[str, Any]:
    """Returns the newest committed fingerprints of ``project``."""
    files = sorted(FINGERPRINTS.glob(f"{project}-*.json"), key=lambda file: _numbers(file.stem))
    known: dict[str, Any] = json.loads(files[-1].read_text())
    return known


def _numbers(name: str) -> list[int]:
    return [int(part) for part in name.rsplit("-", 1)[1].split(".") if part.isdigit()]


def table(project: str, found: Sequence[Row], sources: Sources, known: Mapping[str, Any]) -> str:
    """Returns all that differs as text, the worst first."""
    counted = Counter(row.state for row in found)
    summary = ", ".join(f"{counted[state]} {state}" for state in (UNCHANGED, BODY, SIGNATURE, GONE, BROKEN))
    lines = [f"{project} {sources.version} against {known['version']}, {len(found)} names that are touched: {summary}"]
    for state in (BROKEN, GONE, SIGNATURE, BODY):
        some = sorted((row for row in found if row.state == state), key=lambda row: KINDS.index(row.kinds[0]))
        lines += [f"\n{state}:"] if some else []
        for row in some:
            lines.append(f"  {row.name} ({', '.join(row.kinds)})" + (f": {row.why}" if row.why else ""))
            lines.append(f"    {', '.join(row.where)}")
    if "settings" in known:
        settings = sorted(set(sources.fields(_CONFIG)) - set(known["settings"]))
        flags = sorted(set(sources.flags("megatron.training")) - set(known["flags"]))
        lines += ["\nnew settings of TransformerConfig: " + ", ".join(settings)] * bool(settings)
        lines += ["\nnew flags: " + ", ".join(flags)] * bool(flags)
    return "\n".join(lines) + "\n"


@contextmanager
def source_of(what: str) -> Iterator[Sources]:
    """Yields the sources in a folder, or of a version of megatron-core, which pip downloads."""
    if Path(what).is_dir():
        yield Sources(Path(what))
        return
    if not what.replace(".", "").isalnum():
        raise PlanError(f"{what} is neither a folder nor a version such as 0.19.2")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        done = subprocess.run(
            [*command, "--dest", folder, f"megatron-core=={what}"], capture_output=True, text=True, check=False
        )
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            last = done.stderr.strip().split("\n")[-1]
            raise PlanError(f"megatron-core {what} cannot be downloaded: {last}")
        with zipfile.ZipFile(wheels[0]) as wheel:
            wheel.extractall(Path(folder) / "wheel")
        yield Sources(Path(folder) / "wheel")


def write(path: Path, text: str) -> None:
    """Writes ``text``; raises :class:`PlanError` if that is not possible."""
    try:
        write_text(path, text)
    except OSError as error:
        raise PlanError(f"--record: cannot write {printable_name(str(path))}: {error.strerror}") from None


@click.command(help=__doc__)
@click.argument("version_or_dir")
@click.option("--record", metavar="FOLDER", help="Folder for the fingerprints of this version.")
def main(version_or_dir: str, record: str | None) -> int:
    """Compares one version."""
    broken = False
    with source_of(version_or_dir) as sources:
        present = {project: parts for project, parts in _PACKAGES.items() if any(map(sources.has, parts))}
        if not present:
            raise PlanError(f"{version_or_dir} has neither megatron/core nor transformer_engine")
        names = touched()
        for project, packages in present.items():
            if record is not None:
                path = Path(record) / f"{project}-{sources.version}.json"
                write(path, json.dumps(fingerprints(names, sources, packages), indent=1) + "\n")
                click.echo(f"written: {printable_name(str(path))}")
                continue
            known = known_of(project)
            found = rows(names, sources, known)
            click.echo(table(project, found, sources, known), nl=False)
            broken |= any(row.state in (GONE, BROKEN) for row in found)
    return int(broken)


if __name__ == "__main__":
    sys.exit(run(main, "python -m tools.drift"))
