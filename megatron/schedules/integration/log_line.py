"""Stock's line of an iteration, with what its pipeline came to: what takes the place of the functions that make it."""

from __future__ import annotations

from typing import Any

from megatron.schedules.integration.log.writers import write_scalars
from megatron.schedules.integration.session import Replacement, Session


def training_log(stock: Replacement, session: Session) -> Replacement:
    """Stock's, which says to the log that it is at work."""

    def training_log(*args: Any, **kwargs: Any) -> Any:
        if session.log is None:
            return stock(*args, **kwargs)
        with session.log.logging():
            return stock(*args, **kwargs)

    return training_log


def print_rank_last(stock: Replacement, session: Session) -> Replacement:
    """Stock's, which within its log adds to the line, on all ranks; writers get the same, and so does replanning."""

    def print_rank_last(message: str) -> None:
        found = None
        if session.log is not None and session.function is not None:
            found = session.log.logged(session.function.peak_activation_bytes)
        if found is not None:
            message = "\n".join([message + found.words(), *found.warnings()])
            write_scalars(found.scalars(), session.args)
            if session.replan is not None:
                session.replan.logged(found)
        stock(message)

    return print_rank_last
