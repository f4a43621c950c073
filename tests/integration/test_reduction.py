"""Each chunk's gradients are reduced from its last weight gradient on, while the rest of the schedule goes on."""

from __future__ import annotations

import pytest

from tests.integration.features import each_schedule
from tests.integration.results import MODEL, UNTIED
from tests.integration.server import Megatron
from tests.integration.test_same_result import under

JOB = "--train-iters 1 --global-batch-size 8 --pipeline-model-parallel-size 2 --overlap-grad-reduce --eval-iters 0"


@pytest.mark.feature("each chunk's reduction starts at its last weight gradient")
@pytest.mark.parametrize("schedule", each_schedule("zb-1p", "v-half"))
def test_a_reduction_starts_at_the_chunks_last_weight_gradient(megatron: Megatron, schedule: str) -> None:
    early = False
    for actions in megatron("reductions", 4, [*MODEL, *UNTIED, *JOB.split(), *under(schedule, "1")]):
        chunks = {chunk for _, chunk in actions}
        for chunk in chunks:
            at = actions.index(("reduce", chunk))
            assert actions.count(("reduce", chunk)) == 1
            assert actions[at - 1] in (("W", chunk), ("B", chunk))
            assert not any(kind in "FBIW" and c == chunk for kind, c in actions[at + 1 :])
            early |= any(kind in "FBIW" for kind, _ in actions[at + 1 :])
    assert early or schedule == "zb-1p", "no chunk's reduction is hidden behind another's passes"
