"""Loads of models by their shapes: known parameter counts, and shapes read from Megatron's flags."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.schedules.estimate.build import Build
from megatron.schedules.estimate.devices import DEVICES
from megatron.schedules.estimate.models import MODELS, Model, built, find_model
from megatron.schedules.estimate.parameters import parameters as of_build
from megatron.schedules.estimate.roofline import Roofline
from megatron.schedules.estimate.shape import Shape
from megatron.schedules.estimate.symbols import works
from megatron.schedules.estimate.times import attention_shares, loads, output_times
from megatron.schedules.utils.errors import PlanError

LLAMA = """
# torchrun's line is none of it
--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 8192 \\
  --group-query-attention --num-query-groups 8 --ffn-hidden-size 14336 --swiglu
--vocab-size 128256 --normalization RMSNorm --disable-bias-linear --position-embedding-type rope
--attention-dropout 0 --hidden-dropout 0 --max-position-embeddings 8192
--untie-embeddings-and-output-weights  --bf16 --cross-entropy-loss-fusion --lr "3e-4"
"""
# arXiv 2412.19437, section 4.2: 671B parameters, 61 layers of which 3 are dense, 37B for each token.
DEEPSEEK_V3 = """--num-layers 61 --hidden-size 7168 --num-attention-heads 128 --seq-length 4096 --vocab-size 129280
--swiglu --ffn-hidden-size 18432 --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128
--qk-pos-emb-head-dim 64 --v-head-dim 128 --num-experts 256 --moe-router-topk 8 --moe-ffn-hidden-size 2048
--moe-shared-expert-intermediate-size 2048 --moe-layer-freq ([0]*3+[1]*58) --normalization RMSNorm
--disable-bias-linear --position-embedding-type rope"""


def parameters(model: Model) -> float:
    found = of_build(model.whole)
    return sum(layer.all for layer in found.layers) + 2 * found.table.all


def read(folder: Path, text: str) -> Model:
    path = folder / "model.txt"
    path.write_text(text)
    return find_model(str(path))


def build(*sizes: int, **more: object) -> Build:
    shape = Shape(("*-",) * sizes[0], *sizes[1:], **more)  # type: ignore[arg-type]
    return Build(shape, shape.hidden // shape.heads)


@pytest.mark.parametrize(("name", "billions"), [("Llama-3-8B", 8.03), ("Llama-3-70B", 70.55)])
def test_models_by_name_have_their_parameters(name: str, billions: float):
    assert parameters(MODELS[name]) / 1e9 == pytest.approx(billions, abs=0.01)


def test_kernels_of_the_loss_that_are_not_fused_move_logits_more_often():
    """On an H100 the output layer was measured without: 29.6 ms forward, 28.2 backward, see docs/accuracy.md."""
    model, roofline = MODELS["Llama-3-8B"], Roofline(DEVICES["H100-80GB"])
    fused, apart = (
        output_times(built(model.trained(cross_entropy_loss_fusion=joined)), roofline, 8192.0)
        for joined in (True, False)
    )
    words, moved = 8192.0 * 128_256, 0.85 * 3.35e12
    assert apart.forward - fused.forward == pytest.approx(20 * words / moved)
    assert apart.input_grad - fused.input_grad == pytest.approx(8 * words / moved)
    assert apart.forward == pytest.approx(29.6e-3, rel=0.2)
    assert apart.input_grad + apart.weight_grad == pytest.approx(28.2e-3, rel=0.1)


def test_a_file_of_flags_is_the_model_they_describe(tmp_path: Path):
    assert read(tmp_path, LLAMA).whole == MODELS["Llama-3-8B"].whole


SCRIPTS = {
    "one-line arrays": """
        declare -a MODEL=(--num-layers 24 --hidden-size 2048 --num-attention-heads 16)
        DATA=(--seq-length 2048 --vocab-size 50257)
        torchrun pretrain_gpt.py "${MODEL[@]}" "${DATA[@]}" --bf16
    """,
    "variables with a default": """
        export LAYERS=${LAYERS:-24} SEQ=2048
        : "${HIDDEN:=2048}"
        torchrun pretrain_gpt.py --num-layers $LAYERS --hidden-size ${HIDDEN:=2048} \\
          --num-attention-heads "${HEADS-16}" --seq-length "$SEQ" --vocab-size ${WORDS:-50257} --bf16
    """,
    "flags in a string": """
        GPT_ARGS="--num-layers 24 --hidden-size 2048
            --num-attention-heads 16"
        torchrun pretrain_gpt.py $GPT_ARGS --seq-length 2048 --vocab-size 50257 --bf16
    """,
}


@pytest.mark.parametrize("text", SCRIPTS.values(), ids=SCRIPTS)
def test_scripts_are_read_as_people_write_them(tmp_path: Path, text: str):
    shape = read(tmp_path, text).whole.shape
    assert (len(shape.layers), shape.hidden, shape.heads, shape.sequence) == (24, 2048, 16, 2048)
    assert shape.vocabulary == 50304


def test_what_a_script_leaves_to_others_is_named_and_may_stand_behind_its_name():
    script = "examples/slurm/models/21B.sh"
    with pytest.raises(PlanError, match=f"{script} .*it lacks --seq-length, --vocab-size: add what is missing behind"):
        find_model(script)
    found = find_model(f"{script} --seq-length 1024 --vocab-size 32000")
    assert found.whole.shape == MODELS["21B"].whole.shape
    assert find_model("Llama-3-8B --seq-length 4096").sequence == 4096


def test_experts_latent_attention_and_dense_layers_mixed(tmp_path: Path):
    model = read(tmp_path, DEEPSEEK_V3)
    shape = model.whole.shape
    assert parameters(model) / 1e9 == pytest.approx(671, rel=0.005)
    layers = loads(model.whole).layers
    assert layers[0] == layers[2] != layers[3] == layers[-1]
    # Two operations a parameter that a token meets, and attention's scores; 37B with one of both embeddings.
    met = sum(layer.split.weight_grad for layer in layers) / 2 + shape.hidden * shape.vocabulary
    assert met / 1e9 == pytest.approx(37, rel=0.02)


def test_latent_attention_also_moves_its_keys_and_values(tmp_path: Path):
    """Read as one tensor, projected up; written as keys with their positions, and as values: in bf16, 128 heads."""
    latent, plain = (
        works(of, symbol)[0]
        for of, symbol in (
            (read(tmp_path, f"{DEEPSEEK_V3} --bf16").whole, "+"),
            (build(1, 7168, 56, 4096, 32_000), "*"),
        )
    )
    joined = 2.0 * 128 * ((128 + 128) + (128 + 64) + 128)
    assert latent.moved == tuple(joined + norms for norms in plain.moved)


def test_multi_token_prediction_makes_the_last_stage_a_layer_and_an_output_layer_heavier(tmp_path: Path):
    plain = loads(read(tmp_path, LLAMA).whole)
    ahead = loads(read(tmp_path, f"{LLAMA} --mtp-num-layers 1").whole)
    assert ahead.last.whole.forward == 2 * plain.last.whole.forward
    assert ahead.last.split.forward > plain.layers[-1].split.forward
    assert ahead.layers == plain.layers


def test_attention_grows_with_the_sequence_and_leaves_nothing_to_w():
    short, long = (loads(build(2, 1024, 16, sequence, 32_000)).mean for sequence in (1024, 32_768))
    assert long.weight_grad == short.weight_grad
    assert long.input_grad / long.forward > 2 > 1.2 > short.input_grad / short.forward


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("--num-layers 32", "it lacks --hidden-size, --num-attention-heads, --seq-length, --vocab-size"),
        (LLAMA.replace("32 --hidden", "many --hidden"), "argument --num-layers: invalid int value: 'many'"),
        (LLAMA.replace("4096", "-4096"), "--hidden-size must be 1 or more"),
        (LLAMA + "'", "no closing quotation"),
        (DEEPSEEK_V3.replace("58", "57"), "names 60 layers and --num-layers 61"),
        (DEEPSEEK_V3.replace("([0]*3+[1]*58)", "exit()"), "invalid moe_freq_type value: 'exit()'"),
    ],
    ids=["incomplete", "no number", "below one", "an open quotation", "another number of layers", "no list"],
)
def test_a_file_that_holds_no_model_is_refused_in_one_line(tmp_path: Path, text: str, said: str):
    with pytest.raises(PlanError) as refused:
        read(tmp_path, text)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_without_dropout_no_masks_are_held(tmp_path: Path):
    """arXiv 2205.05198: 34 bytes a token and hidden unit, of which two are masks; of the scores 3 of 5."""
    gpt = "--num-layers 2 --hidden-size 512 --num-attention-heads 8 --seq-length 256 --vocab-size 1000"
    kept, none = "--transformer-impl local", "--attention-dropout 0 --hidden-dropout 0"
    held = {
        flags: loads(read(tmp_path, f"{gpt} --bf16 {flags}").whole).mean.held / 512
        for flags in ("", none, kept, f"{kept} {none}")
    }
    # In one kernel attention keeps a number in single precision for each row of scores.
    scores, rows = 8 * 256 / 512, 4 * 8 / 512
    assert list(held.values()) == [34 + rows, 32 + rows, 34 + 5 * scores, 32 + 2 * scores]


@pytest.mark.parametrize("fused", [True, False])
def test_attention_is_what_a_longer_sequence_adds(fused: bool):
    long, short = (build(4, 256, 8, sequence, 0, groups=2, gated=True, fused=fused) for sequence in (8192, 4096))
    for share, longer, shorter in zip(attention_shares(long), loads(long).mean, loads(short).mean, strict=False):
        assert share == pytest.approx(2 * (longer - shorter) / longer)
    assert 0 < attention_shares(short)[0] < attention_shares(long)[0] < 1
