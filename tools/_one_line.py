"""How programs here end where something is wrong with what they were told: one line, exit status 2."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

import click

from megatron.schedules.planning.errors import PlanError


def run(command: click.Command, program: str, argv: Sequence[str] | None = None) -> int:
    """Run ``command``; its exit status, after a line on standard error where that is not 0."""
    try:
        status = command.main(None if argv is None else list(argv), prog_name=program, standalone_mode=False)
        return status if isinstance(status, int) else 0
    except click.Abort:
        return 128 + signal.SIGINT
    except PlanError as error:
        message = str(error)
    except click.ClickException as error:
        message = f"{error.format_message().rstrip('.')}; --help lists the flags"
    sys.stderr.write(f"{program}: {' '.join(message.split())}\n")
    return 2
