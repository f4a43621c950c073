"""scripts/compare_logs.py: what a training printed becomes a table, and single lines while it goes."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from scripts import compare_logs

LOG = """\
W1121 torch/utils/cpp_extension.py:178] No CUDA runtime is found
pipeline schedule: no CUDA device here: Megatron runs on the CPU through a stand-in
  seq_length ...................................... 128
  seq_length_other ................................ 7
pipeline schedule: v-half, 4 ranks, 8 microbatches, planned bubble 9.4 %, planned peak activation memory \
1.50 MiB, 75.0 % of 1F1B's, and 6 messages at most
pipeline schedule: measured: v-half in iterations 3-5
pipeline schedule: peak activation memory measured: rank 0 2.00 MiB, rank 1 1.00 MiB; worst 2097152 bytes
 [2026-01-02 03:04:05.678901] iteration        1/       3 | consumed samples:           16 | elapsed time \
per iteration (ms): 9000.0 | learning rate: 3.000000E-04 | global batch size:    16 | lm loss: 5.600000E+00 | \
loss scale: 1.0 | grad norm: 1.5 |
 [2026-01-02 03:04:06.678901] iteration        2/       3 | consumed samples:           32 | elapsed time \
per iteration (ms): 1000.0 | learning rate: 3.000000E-04 | global batch size:    16 | lm loss: 5.000000E+00 | \
loss scale: 1.0 | grad norm: 1.5 |
 [2026-01-02 03:04:07.678901] iteration        3/       3 | consumed samples:           48 | elapsed time \
per iteration (ms): 2000.0 | learning rate: 3.000000E-04 | global batch size:    32 | lm loss: 4.500000E+00 | \
loss scale: 1.0 | grad norm: 1.5 |
 validation loss at iteration 3 on validation set | lm loss value: 4.400000E+00 | lm loss PPL: 8.1E+01 |\x20
 validation loss at iteration 3 on test set | lm loss value: 9.900000E+00 | lm loss PPL: 9.1E+01 |\x20
"""


def test_reads_what_a_log_says() -> None:
    run = compare_logs.read_log(LOG)
    assert [iteration.number for iteration in run.iterations] == [1, 2, 3]
    assert run.iterations[0].loss == 5.6
    assert run.sequence == 128
    assert run.tokens_per_second == 2048.0  # of the last two iterations, 16 x 128 in 1 s and 32 x 128 in 2 s
    assert (run.validation_loss, run.bubble, run.planned_memory) == (4.4, 9.4, 75.0)
    assert run.measured_memory == 2 * 2**20


def test_the_table_has_ratios_to_the_last_run() -> None:
    other = LOG.replace("worst 2097152", "worst 4194304").replace("MiB, 75.0", "MiB, 100.0")
    text = compare_logs.table([("v", compare_logs.read_log(LOG)), ("base", compare_logs.read_log(other))])
    rows = {line[:44].strip(): line[44:].split() for line in text.splitlines()}
    assert rows[""] == ["v", "base", "v", "/", "base"]
    assert rows["measured peak activation memory, worst rank"] == ["2.00", "MiB", "4.00", "MiB", "0.50"]
    assert rows["planned peak activation memory, of 1F1B's"] == ["75.0", "%", "100.0", "%", "0.75"]
    assert rows["tokens per second"] == ["2048", "2048", "1.00"]
    assert rows["loss at the last iteration"] == ["4.5000", "4.5000"]


def test_a_stock_log_has_dashes_for_what_no_plan_says() -> None:
    stock = "\n".join(line for line in LOG.splitlines() if "pipeline schedule" not in line)
    runs = [("v", compare_logs.read_log(LOG)), ("stock", compare_logs.read_log(stock))]
    bubble = next(line for line in compare_logs.table(runs).splitlines() if "bubble" in line)
    assert bubble.split() == ["planned", "bubble", "9.4", "%", "-"]
    assert "bubble" not in compare_logs.table(runs[1:])


def test_follows_a_training() -> None:
    copy = io.StringIO()
    shown = list(compare_logs.follow(LOG.splitlines(keepends=True), copy))
    assert copy.getvalue() == LOG
    assert shown[3] == "  iteration 1 of 3: loss 5.6000, 228 tokens/s, 9000 ms"
    assert [line.split()[0] for line in shown] == [
        *("pipeline", "pipeline", "pipeline"),  # without the table of what was measured
        *("iteration", "iteration", "iteration"),
        *("validation", "validation"),
    ]


def test_nothing_in_a_log_is_obeyed_by_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = "train.py: error: \x1b]0;title\x07 \x1b[2J\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(line.encode())))
    assert compare_logs.main(["--follow", str(tmp_path / "log")]) == 0
    assert capsys.readouterr().out == "  train.py: error: \\x1b]0;title\\x07 \\x1b[2J\n"
    assert (tmp_path / "log").read_text() == line, "the log is kept as it came"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_names_the_log(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a line\n")))
    with pytest.raises(SystemExit) as stopped:
        compare_logs.main(["--follow", "/dev/full"])
    assert stopped.value.code == 2
    assert "/dev/full: No space left on device" in capsys.readouterr().err


def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "log").write_text(LOG)
    assert compare_logs.main([f"v-half={tmp_path / 'log'}"]) == 0
    assert "tokens per second" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argument", "what"),
    [
        ("log", "write NAME=LOG"),
        ("a=", "write NAME=LOG"),
        ("a=/nowhere/log", "/nowhere/log: No such file"),
        (f"a={__file__}/../../../setup.py", "no iteration line"),
    ],
)
def test_wrong_arguments(capsys: pytest.CaptureFixture[str], argument: str, what: str) -> None:
    argument = argument.replace(f"{__file__}/../../..", str(Path(__file__).parents[2]))
    with pytest.raises(SystemExit) as stopped:
        compare_logs.main([argument])
    assert stopped.value.code == 2
    assert what in capsys.readouterr().err
