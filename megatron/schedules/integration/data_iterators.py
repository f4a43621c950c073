"""What stock does with a rank's data iterators outside the schedule.

With several chunks stock passes a list with one iterator per chunk. A chunk that reads no data has None. These
functions replace those of stock's that take the list for an iterator. The reason for each is in :mod:`.hooks`.
"""

from __future__ import annotations

from typing import Any

from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.rerun_state_machine import get_rerun_state_machine

from megatron.schedules.integration.schedule_function import listed
from megatron.schedules.integration.session import Session, Stock


def build_data_iterators(stock: Stock, session: Session, *args: Any, **kwargs: Any) -> Any:
    """Builds the iterators of one chunk. Corrects the steps on each of several validation sets."""
    train, valid, test = stock(*args, **kwargs)
    if session.planner is not None:
        if isinstance(session.args.eval_iters, list):
            counts = zip(session.args.eval_iters, session.evaluations or session.args.eval_iters, strict=True)
            session.evaluations = session.args.eval_iters = [max(now or 0, before or 0) for now, before in counts]
        train, test = _single(train), _single(test)
    return train, valid, test


def _single(iterator: Any) -> Any:
    """Returns the iterator of a list with one; a loader of the user's own may be in such a list."""
    return iterator[0] if isinstance(iterator, list) and len(iterator) == 1 else iterator


def evaluate_and_print_results(
    stock: Stock, session: Session, prefix: Any, step: Any, data_iterator: Any, *rest: Any, **kwargs: Any
) -> Any:
    """Evaluates. Passes a list for each validation set, not for each chunk."""
    several = session.planner is not None and session.planner.placement.chunks > 1
    if several and session.args.multiple_validation_sets and all(isinstance(sets, list) for sets in data_iterator):
        data_iterator = [list(chunks) for chunks in zip(*data_iterator, strict=True)]
    return stock(prefix, step, data_iterator, *rest, **kwargs)


def skip_iteration(stock: Stock, session: Session, data_iterator: Any) -> None:
    """Reads the samples of an iteration that is not trained, on every chunk that reads data."""
    if session.planner is None:
        stock(data_iterator)
        return
    reading = [iterator for iterator in listed(data_iterator) if iterator is not None]
    machine, count = get_rerun_state_machine(), get_num_microbatches()
    while machine.should_run_forward_backward(data_iterator):  # it counts iterations
        for iterator in reading:
            for _ in range(count):
                next(iterator)


def save_loader_state(stock: Stock, session: Session, data_iterator: Any, *args: Any, **kwargs: Any) -> None:
    """Saves the state of a loader that can be saved: the first chunk's, because all chunks read the same samples."""
    first = data_iterator if session.planner is None else listed(data_iterator)[0]
    stock(first, *args, **kwargs)
