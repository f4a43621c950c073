"""A process that makes calls of a program and says how each ended; :class:`Calls` below is the client's end.

A call that hangs, or that ends the process, is known as the one that did: another process then goes on.
"""

from __future__ import annotations

import io
import json
import os
import resource
import select
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LONGEST_S = 60.0  # of a call; many times what any takes on a busy machine
_START_S = 120.0  # of a process that may import torch and Megatron
_MOST_BYTES = 16 * 2**30  # of address space: what reads without end ends in a MemoryError
_SHOWN = 8  # arguments of a call that is at fault: the last are the odd ones
_MOST_FILE = 2**26  # of a file that is written


@dataclass(frozen=True)
class Call:
    """A call of a program.

    Args:
        arguments: after the program's name.
        flags: those that are odd in it: an error names one of them.
        around: the environment's variables that it changes; None takes one away.
    """

    arguments: Sequence[str]
    flags: Sequence[str] = ()
    around: Mapping[str, str | None] = field(default_factory=dict)

    def __str__(self) -> str:
        variables = [f"{name}={value[:40]!r}" for name, value in self.around.items() if value is not None]
        shown, more = self.arguments[-_SHOWN:], ["..."] if len(self.arguments) > _SHOWN else []
        return " ".join([*variables, *more, *(repr(argument[:60]) for argument in shown)])


@dataclass(frozen=True)
class Ending:
    """How a call ended.

    Args:
        status: the exit status; None where the process died, the call hung, or it raised what nobody caught.
        out, err: what it said.
    """

    status: int | None
    out: str
    err: str


class Calls:
    """Calls of one program, one after another, in a process of their own.

    Args:
        program: a function of :mod:`.programs`.
        folder: where they are made.
        around: the environment's variables that the process changes; None takes one away.
    """

    def __init__(self, program: str, folder: Path, around: Mapping[str, str | None] | None = None) -> None:
        self._program, self._folder, self._around = program, folder, dict(around or {})

    def ended(self, calls: Iterable[Call]) -> Iterator[tuple[Call, Ending]]:
        """Each of ``calls``, and how it ended."""
        process: _Process | None = None
        try:
            for call in calls:
                if process is None:
                    process = _Process(self._program, self._folder, self._around)
                ending = process.ending(call)
                if ending is None:
                    yield call, Ending(None, "", process.end())
                    process = None
                else:
                    yield call, ending
        finally:
            if process is not None:
                process.end()


class _Process:
    def __init__(self, program: str, folder: Path, around: Mapping[str, str | None]) -> None:
        reader, writer = os.pipe()
        ours = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
        changed = {**os.environ, **ours, **around}
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.sweep.worker", program, str(writer)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=[writer],
            env={name: value for name, value in changed.items() if value is not None},
            cwd=folder,
            start_new_session=True,
        )
        os.close(writer)
        self._answers = os.fdopen(reader)
        select.select([self._answers], [], [], _START_S)
        self._answers.readline()  # it is there; empty where it could not start

    def ending(self, call: Call) -> Ending | None:
        """How ``call`` ended; None where the process did, or the call does not."""
        assert self._process.stdin is not None
        asked = {"arguments": list(call.arguments), "around": dict(call.around)}
        try:
            self._process.stdin.write(json.dumps(asked).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return None
        ready, _, _ = select.select([self._answers], [], [], LONGEST_S)
        answer = self._answers.readline() if ready else ""
        return Ending(**json.loads(answer)) if answer else None

    def end(self) -> str:
        """End the process, and all it started; what it said itself."""
        hung = self._process.poll() is None
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, 9)
        _, errors = self._process.communicate()
        self._answers.close()
        how = "did not end" if hung else f"the process died with status {self._process.returncode}"
        return f"{how}\n{errors.decode(errors='replace')[-2000:]}"


def _serve(program: Callable[[list[str]], Any], requests: Iterable[bytes], answers: io.TextIOBase) -> None:
    for line in requests:
        asked = json.loads(line)
        before = dict(os.environ)
        for name, value in asked["around"].items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        answers.write(json.dumps(_ending(program, asked["arguments"])) + "\n")
        answers.flush()
        os.environ.clear()
        os.environ.update(before)


def _text(said: bytes) -> str:
    """What a person reads of it: nothing of a picture, which goes to a pipe alone."""
    return "(a picture)" if said.startswith((b"\x89PNG", b"%PDF")) else said.decode()


def _ending(program: Callable[[list[str]], Any], arguments: list[str]) -> dict[str, Any]:
    """How a call ended; its streams are such as a terminal's are, which cannot write everything."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors=how) for how in ("strict", "backslashreplace"))
    status: Any
    with redirect_stdout(out), redirect_stderr(err):
        begun = time.monotonic()
        try:
            status = program(arguments)
        except SystemExit as leaving:
            status = leaving.code
        except BaseException:
            traceback.print_exc()
            status = "raised"
        took = time.monotonic() - begun
    if status is None:
        status = 0
    said = []
    for stream in (out, err):
        stream.flush()
        said.append(_text(stream.buffer.getvalue()))  # type: ignore[attr-defined]
    if took > LONGEST_S:
        said[1] += f"\ntook {took:.0f} s"
        status = None
    return {"status": status if isinstance(status, int) else None, "out": said[0], "err": said[1]}


def main() -> None:
    """Serve what is asked for on standard input; the answers go to the descriptor named."""
    from tests.sweep import programs

    requests = os.fdopen(os.dup(0), "rb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    answers = os.fdopen(int(sys.argv[2]), "w")
    program = programs.named(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_MOST_FILE, _MOST_FILE))
    answers.write("here\n")
    answers.flush()
    _serve(program, requests, answers)


if __name__ == "__main__":
    main()
