"""Which weight gradients may run ahead of their W."""

from __future__ import annotations

from megatron.schedules.planner.registry import Request, plan
from megatron.schedules.programs.lowering import lower
from megatron.schedules.runtime.behind_messages import ComingWeights
from megatron.schedules.schedule.kinds import Kind
from megatron.schedules.schedule.text_forms import from_csv


def test_w_are_due_in_order_after_their_i_but_for_the_last_of_a_chunk():
    rows = (",".join(f"{rank}{kind}{m}" for kind in "FIW" for m in range(3)) for rank in range(2))
    for program in lower(from_csv("\n".join(rows))):
        stage, coming = program.rank, ComingWeights(program)
        assert list(coming.due()) == []
        coming.ended(Kind.I, stage, 1)
        assert list(coming.due()) == []  # W of microbatch 0 comes first, and its I has not run
        coming.ended(Kind.I, stage, 0)
        coming.ended(Kind.I, stage, 2)
        assert list(coming.due()) == [(stage, 0), (stage, 1)]  # a reduction begins in the third
        coming.ended(Kind.W, stage, 0)
        coming.ended(Kind.W, stage, 0)  # a tool may repeat a pass
        assert list(coming.due()) == [(stage, 1)]
        coming.ended(Kind.W, stage, 1)
        assert list(coming.due()) == []


def test_nothing_passes_a_whole_backward():
    program = lower(plan(Request("1f1b", 2, 2)))[0]
    coming = ComingWeights(program)
    coming.ended(Kind.I, 0, 0)
    assert list(coming.due()) == []
