"""Pieces that stand for those of the GPU tests: each ends in a way of its own."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator

from tests.waiting import HANGS_S
from tools.gpu_tests.pieces import FAULT, Piece, Row, Setting, Skipped


def passes(setting: Setting, what: str) -> Iterator[Row]:
    yield {"what": what, "on CPU": setting.on_cpu, FAULT: ""}


def faulty(setting: Setting) -> Iterator[Row]:
    yield {"what": "good", FAULT: ""}
    yield {"what": "bad", FAULT: "2 is not 3"}


def raises(setting: Setting) -> Iterator[Row]:
    yield {"what": "good", FAULT: ""}
    raise ValueError("no more rows\nand a second line")


def dies(setting: Setting) -> Iterator[Row]:
    yield {"what": "good", FAULT: ""}
    os._exit(0)


def skips(setting: Setting) -> Iterator[Row]:
    raise Skipped("there is no such library")
    yield {}


def finds_nothing(setting: Setting) -> Iterator[Row]:
    yield from ()


def sleeps(setting: Setting) -> Iterator[Row]:
    """With a process of its own that would sleep on."""
    yield {"what": "good", "child": subprocess.Popen(["sleep", "3600"]).pid, FAULT: ""}
    time.sleep(3600)


def leaves(setting: Setting) -> Iterator[Row]:
    yield {"what": "good", "child": subprocess.Popen(["sleep", "3600"]).pid, FAULT: ""}


def rank_of_two(ending: str) -> str:
    """A rank, of which the second ends otherwise."""
    if os.environ["RANK"] == "1":
        print("the last words of rank 1", flush=True)
        if ending == "raises":
            raise ValueError("not today")
        if ending == "dies":
            os._exit(3)
        if ending == "hangs":
            time.sleep(3600)
    return f"{os.environ['RANK']} of {os.environ['WORLD_SIZE']} {os.environ['MORE']}"


def piece(name: str, *arguments: object, gpus: int = 1, limit_s: float = HANGS_S) -> Piece:
    """One of the functions above."""
    return Piece(name, f"it {name}", (f"tests.tools.gpu_pieces:{name}", arguments), gpus, limit_s)
