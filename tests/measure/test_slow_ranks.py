"""A rank that has become slow is told, once and after a while; noise, and all growing slower alike, are not."""

from __future__ import annotations

from megatron.schedules.measure.slow_ranks import IdleWatch, Slow, SlowWatch, slow_links

V = (0, 1, 2, 2, 1, 0)
EVEN = [10.0] * 6


def slowed(rank: int, ratio: float) -> list[float]:
    return [10 * ratio if rank == on else 10.0 for on in V]


def watching(profiled: bool = True) -> SlowWatch:
    watch = SlowWatch(V)
    if profiled:
        watch.expect(EVEN)
    else:
        assert [watch.add(EVEN) for _ in range(3)] == [[], [], []]
    return watch


def test_a_slow_rank_is_told_in_the_third_iteration_and_then_no_more() -> None:
    for profiled in (True, False):
        watch = watching(profiled)
        assert watch.add(EVEN) == []
        said = [watch.add(slowed(1, 1.3)) for _ in range(5)]
        assert said == [[], [], [Slow(1, 1.3)], [], []]


def test_one_that_was_quick_again_is_told_anew() -> None:
    watch = watching()
    said = [watch.add(slowed(1, 1.5)) for _ in range(3)] + [watch.add(EVEN)]
    said += [watch.add(slowed(1, 1.4)) for _ in range(3)]
    assert said == [[], [], [Slow(1, 1.5)], [], [], [], [Slow(1, 1.4)]]


def test_single_slow_iterations_are_noise() -> None:
    watch = watching()
    assert not any(watch.add(slowed(0, 3.0)) + watch.add(slowed(0, 3.0)) + watch.add(EVEN) for _ in range(4))


def test_where_all_are_slower_alike_none_is_slow() -> None:
    watch = watching()
    assert not any(watch.add([20.0] * 6) for _ in range(6))


def test_what_is_expected_anew_is_no_longer_slow() -> None:
    watch = watching()
    watch.add(slowed(2, 1.5))
    watch.add(slowed(2, 1.5))
    watch.expect(slowed(2, 1.5))
    assert not any(watch.add(slowed(2, 1.5)) for _ in range(4))


def test_one_of_two_ranks_is_slow_against_the_quicker_one() -> None:
    watch = SlowWatch((0, 1))
    watch.expect([10.0, 10.0])
    assert [watch.add([10.0, 14.0]) for _ in range(3)][-1] == [Slow(1, 1.4)]


def test_a_bubble_that_has_grown_is_told_once() -> None:
    watch = IdleWatch()
    assert not any(watch.add(bubble) for bubble in (0.10, 0.30, 0.11))
    said = [watch.add(bubble) for bubble in (0.17, 0.17, 0.12, 0.17, 0.17, 0.17, 0.17)]
    assert said == [False] * 5 + [True, False]
    watch.expect()
    assert not any(watch.add(0.17) for _ in range(9))


def test_slow_links_are_those_that_matter_compared_with_a_pass() -> None:
    before = [(0, 1, 1.0), (1, 0, 1.0), (1, 2, 0.01), (2, 1, 1.0)]
    now = [(0, 1, 4.0), (1, 0, 1.2), (1, 2, 0.1), (2, 1, 0.5), (2, 3, 9.0)]
    assert slow_links(before, now, 10.0) == [(0, 1, 4.0, 1.0)]
    assert slow_links(before, now, 1.0) == [(0, 1, 4.0, 1.0), (1, 2, 0.1, 0.01)]
