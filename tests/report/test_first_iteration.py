"""What a job says after its first iteration of linears, offloaded bytes and peak memory."""

from __future__ import annotations

from collections import Counter

from megatron.schedules.report.first_iteration import ExpectedFigures, Seen, lines

MIB = 2**20


def rank(moved: dict[tuple[int, int], list[int]] | None = None, peak: int = 0, **linears: int) -> Seen:
    return Seen(Counter(linears), True, moved or {}, peak)


def test_linears_of_all_ranks_are_counted_by_kind() -> None:
    ranks = [rank(Row=2, Column=2), rank(Row=3)]
    assert list(lines(ranks, ExpectedFigures(True))) == [
        "7 linears split the backward (2 Column, 5 Row); gradient accumulation fusion is on"
    ]
    assert list(lines(ranks, ExpectedFigures(False))) == ["no linear splits its backward in this schedule"]


def test_a_layer_that_offloads_much_less_than_planned_is_named() -> None:
    """Stages 0 and 1 offload two layers each, of two microbatches; of one layer half stays once."""
    both = [4 * MIB, 4 * MIB]
    ranks = [rank({(0, 0): both, (0, 1): both}, 30 * MIB), rank({(1, 0): [4 * MIB, 2 * MIB], (1, 1): both}, 20 * MIB)]
    _, total, short, peak = lines(ranks, ExpectedFigures(True, [[4.0 * MIB] * 2] * 2, 31.0 * MIB))
    assert total == "offloaded 30.00 MiB, planned 32.00 MiB"
    assert short.startswith("layer 1 of stage 1 offloaded 3.00 MiB of each microbatch, planned 4.00 MiB: the rest")
    assert peak == "peak activation memory 30.00 MiB on rank 0, planned 31.00 MiB on the worst rank"
    _, total, peak = lines(ranks, ExpectedFigures(True))
    assert (total, peak) == ("offloaded 30.00 MiB", "peak activation memory 30.00 MiB on rank 0")


def test_places_where_the_host_waits_are_named_if_they_are_known() -> None:
    plain = rank(Row=1)
    several = [plain._replace(waits=Counter({"a.py:1": 3})), plain._replace(waits=Counter({"a.py:1": 1, "b.py:2": 1}))]
    assert list(lines(several, ExpectedFigures(True)))[1:] == [
        "the host waited for its device 5 times in the passes, most often at a.py:1 (4), b.py:2 (1)"
    ]
    assert list(lines([plain._replace(waits=Counter())], ExpectedFigures(True)))[1:] == [
        "the host waited for its device nowhere in the passes"
    ]
    assert len(list(lines([plain], ExpectedFigures(True)))) == 1


def test_linears_that_do_not_split_and_hooks_that_see_parts_are_named() -> None:
    first = rank(Row=1)._replace(whole=Counter({("Column", "frozen weight"): 2}), partial=["fc1.weight"])
    other = rank(Row=1)._replace(whole=Counter({("Linear", "not Megatron's"): 1, ("Column", "frozen weight"): 1}))
    assert list(lines([first, other], ExpectedFigures(True)))[1:] == [
        "4 linears did not split (3 Column: frozen weight, 1 Linear: not Megatron's)",
        "the hooks of 1 parameter ran twice for a microbatch, each time with a part of the gradient, because not only "
        "their linears use them: fc1.weight (rank 0)",
    ]
    assert len(list(lines([first, other], ExpectedFigures(False)))) == 1
