"""Time of experts' messages: from tokens, sizes and links; part of F and I; hidden only where a flag says so."""

from __future__ import annotations

import pytest

from megatron.schedules.estimate.build import LayerKind
from megatron.schedules.estimate.calibration import CALIBRATED
from megatron.schedules.estimate.devices import DEVICES
from megatron.schedules.estimate.models import MODELS, Model, built
from megatron.schedules.estimate.roofline import Roofline
from megatron.schedules.estimate.symbols import works
from megatron.schedules.estimate.times import ANY, expert_messages, layer_times, loads, message_shares
from tools._grid import search
from tools._iteration import estimate
from tools._methods import METHODS
from tools._question import Question
from tools._setting import NONE, Setting

H100 = DEVICES["H100-80GB"]
FLAGS = """--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048
    --vocab-size 32000 --num-experts 64 --moe-router-topk 6 --moe-ffn-hidden-size 512 --swiglu --bf16
    --untie-embeddings-and-output-weights --moe-layer-freq 2"""
RACKS = "GB200", "B200"
HIDES = "--overlap-moe-expert-parallel-comm"
TOKENS = 2048
NAMED = {method.name: method for method in METHODS}


def model(expert: int, more: str = "") -> Model:
    return Model("experts", f"{FLAGS} --expert-model-parallel-size {expert} {more}")


@pytest.mark.parametrize(
    ("flags", "fused"),
    [
        ("--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep", True),
        ("--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepep", False),
        ("--moe-token-dispatcher-type alltoall", False),
        ("--moe-token-dispatcher-type alltoall --moe-flex-dispatcher-backend hybridep", False),
    ],
)
def test_hybridep_permutes_tokens_where_it_sends_them(flags: str, fused: bool):
    """So less is permuted apart from messages, and the host is waited for less."""
    build, roofline = built(model(8, flags).trained()), Roofline(H100)
    left = CALIBRATED.fused_dispatch if fused else 1.0
    assert build.fused_dispatch == fused
    assert roofline.permuted(build, 1e6) == left * CALIBRATED.routed_passes / 2 * roofline.stream(1e6, 0)
    assert roofline.host(build) == pytest.approx((left * CALIBRATED.experts_host + 8 * CALIBRATED.each_expert) / 3)


@pytest.mark.parametrize(("expert", "on_a_rank"), [(1, 64), (8, 8), (64, 1)])
def test_a_layer_waits_for_its_host_for_each_expert_on_the_rank_unless_they_are_fused(expert: int, on_a_rank: int):
    builds = [built(model(expert).trained(use_transformer_engine_op_fuser=fuses)) for fuses in (False, True)]
    apart, fused = (Roofline(H100).host(build) for build in builds)
    assert 3 * fused == pytest.approx(CALIBRATED.experts_host)
    assert 3 * (apart - fused) == pytest.approx(on_a_rank * CALIBRATED.each_expert)


@pytest.mark.parametrize(
    ("expert", "near", "far"),
    [(1, 0, 0), (8, 7, 0), (16, 7, 1), (64, 7, 7)],
    ids=["one rank", "a node", "two nodes", "eight nodes"],
)
def test_tokens_go_once_to_each_node_and_each_rank_and_the_slower_link_counts(expert: int, near: int, far: int):
    build = built(model(expert).trained())
    found = expert_messages(build, works(build, "E")[0], Roofline(H100), TOKENS)
    # There and back: tokens, width, bf16. A node with several experts of a token gets one copy, and so does a rank.
    sent, nodes = 2 * TOKENS * 1024 * 2, far + 1
    within = sent * nodes * near * (1 - (1 - 1 / expert) ** 6)
    beyond = sent * far * (1 - (1 - 1 / nodes) ** 6)
    assert found == pytest.approx(max(within / (0.75 * 450e9), beyond / (0.75 * 50e9)))
    overlapped = expert_messages(build, works(build, "E")[0], Roofline(H100, overlaps=True), TOKENS)
    assert overlapped == pytest.approx(CALIBRATED.messages * found)
    # As a flag without which nothing else changes: the same with any GPU's prices.
    assert (expert_messages(build, works(build, "E")[0], ANY, 1.0) > 0) == (expert > 1)


def test_experts_of_two_tensor_parallel_ranks_leave_room_for_half_as_many_on_a_node():
    build = built(model(8, "--tensor-model-parallel-size 2 --expert-tensor-parallel-size 2").trained())
    found = expert_messages(build, works(build, "E")[0], Roofline(H100), TOKENS)
    # Half the tokens of a rank, to the other one of two nodes.
    each = 2 * TOKENS / 2 * (1 - (1 - 1 / 2) ** 6) * 1024 * 2
    assert found == pytest.approx(each / (0.75 * 50e9))


def test_a_rack_of_gpus_is_one_domain():
    """72 GPUs of a GB200 are connected by links; eight of a B200 are."""
    build = built(model(64).trained())
    rack, hosts = (expert_messages(build, works(build, "E")[0], Roofline(DEVICES[each]), TOKENS) for each in RACKS)
    # To 63 other ranks, and to 7 other nodes.
    assert rack == pytest.approx(2 * TOKENS * 1024 * 2 * 63 * (1 - (63 / 64) ** 6) / (0.75 * 900e9))
    assert hosts == pytest.approx(2 * TOKENS * 1024 * 2 * 7 * (1 - (7 / 8) ** 6) / (0.75 * 50e9))


class Free(Roofline):
    """Sends to experts take no time."""

    def sent(self, size: float, *, same_node: bool) -> float:
        return 0.0


def test_f_and_i_of_layers_with_experts_contain_them_and_w_does_not():
    build = built(model(16).trained())
    whole, free = (
        [layer_times(build, prices(H100), TOKENS, LayerKind(symbols)) for symbols in ("*E", "*-")]
        for prices in (Roofline, Free)
    )
    message = expert_messages(build, works(build, "E")[0], Roofline(H100), TOKENS)
    assert [a - b for a, b in zip(whole[0], free[0], strict=True)] == pytest.approx([message, message, 0.0])
    assert whole[1] == free[1]
    shares, mean = message_shares(build, Roofline(H100), TOKENS), loads(build, Roofline(H100), TOKENS).mean
    # Every second layer has experts.
    assert [share * time for share, time in zip(shares, mean[:2], strict=True)] == pytest.approx([message / 2] * 2)


def test_a_dense_model_sends_none():
    assert message_shares(MODELS["9.6B"].whole) == (0.0, 0.0)


def setting(method: str, more: str = "") -> Setting:
    return Setting(NAMED[method], model(8, more), H100, 8, 1, 2, 1, 64, expert=8)


def test_only_the_flag_lets_weight_gradients_hide_them():
    plain, hides = setting("V-ZB"), setting("V-ZB", HIDES)
    assert plain.costs == hides.costs.without_messages
    shares = message_shares(hides.trained.build, Roofline(H100), hides.trained.build.tokens)
    forward, input_grad, _ = hides.costs.layers.passes
    # A part stays exposed, as under stock's overlap.
    behind = 1 - CALIBRATED.messages
    assert hides.costs.layers.messages == pytest.approx((behind * shares[0] * forward, behind * shares[1] * input_grad))
    found = estimate(hides)
    hidden, exposed = found.outcome.messages
    assert hidden > 0 and exposed > 0 and found.seconds < estimate(plain).seconds
    assert estimate(plain).outcome.messages == (0.0, 0.0)
    # Without a W of its own a schedule hides none.
    assert estimate(setting("1F1B", HIDES)).outcome.messages[0] == 0
    assert estimate(setting("1F1B", HIDES)).seconds == pytest.approx(estimate(setting("1F1B")).seconds)


def test_the_grid_search_finds_what_trying_everything_finds():
    question = Question(model(8, HIDES), H100, 16, 64, recomputes=(NONE,))
    tried = [found for each in question.settings(NAMED["V-Half"]) if (found := estimate(each)).fits]
    assert search(question, NAMED["V-Half"]).best[0].seconds == min(found.seconds for found in tried)
