"""Runs a command and prints its output, or one line on standard error that says what is wrong."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from megatron.schedules.utils.errors import PlanError, one_line
from megatron.schedules.utils.output_files import write_text


def run(
    command: click.Command,
    name: str,
    argv: Sequence[str] | None = None,
    *,
    flags: Mapping[str, str] | None = None,
    spoken: str | None = None,
) -> int:
    """Runs ``command``. An error in its arguments prints one line on standard error.

    Args:
        command: command to run.
        name: name of the program.
        argv: arguments; by default those of the process.
        flags: flag of each part of a request, see :meth:`.PlanError.told`.
        spoken: name of the program in errors; by default ``name``.

    Returns:
        The exit status: 0; 2 for an error; 130 when interrupted; 141 when the reader of the output has closed it.
    """
    if sys.stderr is None:  # closed by the caller
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - as long as the process lives
    try:
        status = command.main(None if argv is None else list(argv), prog_name=name, standalone_mode=False)
        return status if isinstance(status, int) else 0
    except click.Abort:
        return 128 + signal.SIGINT
    except PlanError as error:
        message = error.told(flags or {})
    except click.ClickException as error:
        message = f"{error.format_message().rstrip('.')}; --help lists the flags"
    sys.stderr.write(f"{spoken or name}: {one_line(message)}\n")
    return 2


def emit(text: str | bytes, output: Path | None) -> None:
    """Writes ``text`` to standard output or to ``output``.

    The file is written completely or not at all, see :func:`.write_text`.

    Raises:
        PlanError: the output cannot be written.
    """
    if output is not None:
        try:
            write_text(output, text)
        except OSError as error:
            raise PlanError(f"--output: cannot write {output}: {error.strerror}") from None
        return
    try:
        if sys.stdout is None:
            raise OSError(0, "it is closed")
        if isinstance(text, str):
            sys.stdout.write(text)
        elif sys.stdout.isatty():
            raise OSError(0, "a picture is no text for a terminal")
        else:
            sys.stdout.buffer.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        # Otherwise Python reports the unwritten buffer as an error at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise click.exceptions.Exit(128 + signal.SIGPIPE) from None
    except OSError as error:
        raise PlanError(f"cannot write to standard output: {error.strerror}; --output names a file") from None
