"""Each feature of Megatron's in a hybrid model: the tests of a GPT, of jobs that build the same layers as symbols.

On Transformer Engine's own Python, because hybrid models have its layers. Attention masks, which these do not read, are
in ``test_hybrid.py``, and CUDA graphs in ``test_graphed_jobs.py``.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.as_hybrid import HybridModels
from tests.integration.conftest import Training
from tests.integration.features import SCHEDULES
from tests.integration.server import Megatron
from tests.integration.test_checkpoints import (
    saved,
    test_a_resumed_job_is_the_same_to_the_bit,
    test_exit_at_an_interval_saves_and_the_next_start_goes_on,
)
from tests.integration.test_compatibility import test_alone
from tests.integration.test_frozen import test_low_rank_adapters
from tests.integration.test_logging import test_the_same_is_logged
from tests.integration.test_moe import test_hidden_messages_change_no_result
from tests.integration.test_moe import test_the_result_is_stocks as test_experts
from tests.integration.test_no_waits import test_nothing_in_a_program_waits_for_the_device
from tests.integration.test_packed import test_every_rank_sees_the_bounds_and_results_are_stocks
from tests.integration.test_reduction import test_reductions_start_within_the_chunks_last_pass
from tests.integration.test_validation_sets import data, test_each_validation_set_in_full
from tests.integration.test_varied_sizes import test_same_losses_and_gradients_to_the_bit
from tests.integration.test_vocabulary_result import test_losses_and_gradients_are_stocks
from tests.integration.test_with_plain_attention import (
    test_distributed_optimizer_over_context_and_data_ranks,
)
from tests.integration.test_with_plain_attention import test_the_result_is_stocks as test_other_attention

__all__ = [
    "data",
    "saved",
    "test_a_resumed_job_is_the_same_to_the_bit",
    "test_alone",
    "test_distributed_optimizer_over_context_and_data_ranks",
    "test_each_validation_set_in_full",
    "test_every_rank_sees_the_bounds_and_results_are_stocks",
    "test_exit_at_an_interval_saves_and_the_next_start_goes_on",
    "test_experts",
    "test_hidden_messages_change_no_result",
    "test_losses_and_gradients_are_stocks",
    "test_low_rank_adapters",
    "test_nothing_in_a_program_waits_for_the_device",
    "test_other_attention",
    "test_reductions_start_within_the_chunks_last_pass",
    "test_same_losses_and_gradients_to_the_bit",
    "test_the_same_is_logged",
]
pytestmark = pytest.mark.another_model("hybrid", "zb-1p", "v-half", one_more_of=SCHEDULES)


@pytest.fixture(scope="module")
def megatron(te: Megatron) -> Any:
    """Trains hybrid models where tests train GPTs."""
    return HybridModels(te)


@pytest.fixture(scope="module")
def train(megatron: Any, tmp_path_factory: pytest.TempPathFactory) -> Training:
    """The same, from common weights."""
    return Training(megatron, tmp_path_factory.mktemp("checkpoints"))
