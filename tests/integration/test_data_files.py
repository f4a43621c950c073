"""A file that a flag about data names is read, or refused in one line before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.schedules.integration.gpt_data import refuse_other_data, sequences_per_dataset

FLAG = "--per-dataset-sequences-path"


def test_counts_of_sequences_are_read_by_data_set(tmp_path: Path):
    path = tmp_path / "counts.json"
    path.write_text('{"a/text": [12, 13], "b": [1, 2]}')
    refuse_other_data([FLAG, str(path)])
    assert sequences_per_dataset(path) == {"a/text": (12, 13), "b": (1, 2)}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "No such file"),
        ("", "is no list of data sets: it is no JSON"),
        ("[1]", "$ must be an object, not a list"),
        ('{"a": 3}', "must be a list, not a whole number"),
        ('{"a": [1]}', "must be a list of length 2"),
        ('{"a": [1, -1]}', "must be a whole number >= 0"),
        ('{"a": ' + "[" * 5000, "lists are nested too deeply"),
        ('{"\\ud800": [1, 2]}', "it is no JSON"),
    ],
)
def test_counts_that_are_none_are_refused_in_one_line(
    text: str | None, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "counts.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit) as ended:
        refuse_other_data([FLAG, str(path)])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.count("\n") == 1
    assert f"{FLAG}: " in said and str(path) in said and why in said
