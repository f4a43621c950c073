"""tools/preprocess_data.py: text and JSONL become datasets that Megatron reads; bad input ends in one line."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("megatron.core", reason="needs the extra [megatron]")

from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.tokenizers import MegatronTokenizer

from tools import preprocess_data

TEXTS = ["def f():\n    return 1\n", "größer ≠ kleiner\r\n", "x"]


def write_jsonl(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def run(prefix: Path, *arguments: object) -> int:
    return preprocess_data.main([*map(str, arguments), "--output-prefix", str(prefix)])


def documents(prefix: Path, key: str = "text") -> list[list[int]]:
    dataset = IndexedDataset(f"{prefix}_{key}_document")
    return [dataset[index].tolist() for index in range(len(dataset))]


def as_bytes(text: str, *more: int) -> list[int]:
    return [*text.encode(), *more]


def error_of(capsys: pytest.CaptureFixture[str], prefix: Path, *arguments: object) -> str:
    """Runs it, and returns the one line that it must end with; it must leave nothing behind."""
    before = set(prefix.parent.iterdir())
    assert run(prefix, *arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("preprocess_data.py: error: ")
    assert captured.err.count("\n") == 1
    assert set(prefix.parent.iterdir()) == before
    return captured.err


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    for number, text in enumerate(TEXTS):
        (tmp_path / f"{number}.txt").write_bytes(text.encode())
    assert run(tmp_path / "d", "--input", tmp_path / "*.txt") == 0
    assert documents(tmp_path / "d") == [as_bytes(text) for text in TEXTS]
    assert np.fromfile(tmp_path / "d_text_document.bin", np.uint16).size == sum(len(t.encode()) for t in TEXTS)


def test_a_jsonl_line_is_one_document_and_ends_with_eod(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", *({"text": text} for text in TEXTS))
    assert run(tmp_path / "d", "--input", source, "--append-eod") == 0
    assert documents(tmp_path / "d") == [as_bytes(text, 256) for text in TEXTS]


def test_training_with_the_null_tokenizer_has_the_same_vocabulary() -> None:
    null = MegatronTokenizer.from_pretrained(metadata_path={"library": "null-text"}, vocab_size=257)
    assert null.eod == preprocess_data.BYTE_LEVEL_EOD
    assert null.vocab_size == preprocess_data.BYTE_LEVEL_EOD + 1


def test_every_key_gets_its_own_dataset(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", {"title": "t", "body": "b1"}, {"title": "", "body": "b2"})
    assert run(tmp_path / "d", "--input", source, "--json-keys", "title", "body") == 0
    assert documents(tmp_path / "d", "title") == [as_bytes("t")]
    assert documents(tmp_path / "d", "body") == [as_bytes("b1"), as_bytes("b2")]


def test_several_workers_give_the_same_files(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", *({"text": f"document {n} " * (n % 7)} for n in range(400)))
    assert run(tmp_path / "one", "--input", source, "--append-eod") == 0
    assert run(tmp_path / "two", "--input", source, "--append-eod", "--workers", "2") == 0
    for suffix in ("bin", "idx"):
        one, two = (tmp_path / f"{name}_text_document.{suffix}" for name in ("one", "two"))
        assert one.read_bytes() == two.read_bytes()


def test_globs_go_down_folders_and_name_each_file_once(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "1.txt").write_text("one")
    (tmp_path / "a" / "b" / "2.txt").write_text("two")
    patterns = [str(tmp_path / "a" / "1.txt"), str(tmp_path / "**" / "*.txt")]
    assert preprocess_data.input_files(patterns) == [tmp_path / "a" / "1.txt", tmp_path / "a" / "b" / "2.txt"]


def test_sentencepiece_through_megatrons_factory(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    words = ["the", "pipeline", "schedule", "holds", "the", "memory", "of", "every", "rank"]
    sentences = [" ".join(words[i:] + words[:i]) for i in range(len(words))] * 5
    with (tmp_path / "m.model").open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences), model_writer=file, vocab_size=30, minloglevel=2
        )
    source = write_jsonl(tmp_path / "a.jsonl", {"text": sentences[0]})
    flags = ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", tmp_path / "m.model"]
    assert run(tmp_path / "d", "--input", source, *flags, "--append-eod") == 0
    processor = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "m.model"))
    assert documents(tmp_path / "d") == [[*processor.encode(sentences[0]), processor.eos_id()]]


def test_hugging_face_through_megatrons_factory(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs the extra [tokenizers]")
    import tokenizers

    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "</s>": 2, "?": 3}, unk_token="?"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    (tmp_path / "hf").mkdir()
    model.save(str(tmp_path / "hf" / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "unk_token": "?"}
    (tmp_path / "hf" / "tokenizer_config.json").write_text(json.dumps(config))
    source = write_jsonl(tmp_path / "a.jsonl", {"text": "a b a"}, {"text": "b"})
    flags = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", tmp_path / "hf", "--workers", "2"]
    assert run(tmp_path / "d", "--input", source, *flags, "--append-eod") == 0
    assert documents(tmp_path / "d") == [[0, 1, 0, 2], [1, 2]]


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{", "a.jsonl:2: not JSON"),
        ("[1]", "a.jsonl:2: not a JSON object"),
        ('{"body": "b"}', "a.jsonl:2: no key 'text'; the keys are body"),
        ('{"text": 3}', "a.jsonl:2: the value of 'text' is not a string"),
        ('{"text": "\\ud800"}', "a.jsonl:2: 'text' holds half a surrogate pair"),
        ("[" * 100_000, "a.jsonl:2: not JSON"),
    ],
)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_bad_line_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, what: str, workers: int
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n' + line + "\n")
    assert what in error_of(capsys, tmp_path / "d", "--input", tmp_path / "a.jsonl", "--workers", workers)


def test_a_file_without_line_ends_is_not_read_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preprocess_data, "_LONGEST", 2**20)
    for name, said in (("a.jsonl", ":1: a line of more than 1 MiB"), ("a.txt", ": a text of more than 1 MiB")):
        with (tmp_path / name).open("wb") as file:
            file.truncate(2**40)  # a hole
        assert f"{name}{said}" in error_of(capsys, tmp_path / "d", "--input", tmp_path / name)


def test_a_file_that_is_not_text_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.bin").write_bytes(b"ab\xff")
    assert "a.bin is not UTF-8 text: invalid start byte at byte 2" in error_of(
        capsys, tmp_path / "d", "--input", tmp_path / "a.bin"
    )
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "\xff"}\n')
    assert "a.jsonl:1: not UTF-8 text" in error_of(capsys, tmp_path / "d", "--input", tmp_path / "a.jsonl")


def test_input_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no such file" in error_of(capsys, tmp_path / "d", "--input", tmp_path / "*.txt")
    assert "is a folder" in error_of(capsys, tmp_path / "d", "--input", tmp_path)
    (tmp_path / "empty.txt").touch()
    assert "holds no text" in error_of(capsys, tmp_path / "d", "--input", tmp_path / "empty.txt")


def test_output_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("a")
    assert run(tmp_path / "a.txt" / "d", "--input", tmp_path / "a.txt") == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_tokenizer_that_cannot_be_built(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("a")
    flags = ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", tmp_path / "none.model"]
    message = error_of(capsys, tmp_path / "d", "--input", tmp_path / "a.txt", *flags)
    assert "cannot build SentencePieceTokenizer" in message


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (["--workers", "0"], "--workers must be at least 1"),
        (["--json-keys", "a", "a"], "names a key twice"),
        (["--tokenizer-type", "NullTokenizer"], "invalid choice: 'NullTokenizer'"),
        (["--vocab-size", "300"], "unrecognized arguments"),
    ],
)
def test_wrong_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], what: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        run(tmp_path / "d", "--input", tmp_path / "a.txt", *flags)
    assert stopped.value.code == 2
    assert what in capsys.readouterr().err


def test_json_keys_are_not_for_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("a")
    assert "--json-keys is for JSONL" in error_of(
        capsys, tmp_path / "d", "--input", tmp_path / "a.txt", "--json-keys", "body"
    )


@pytest.mark.nightly
def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    source, out = (
        write_jsonl(tmp_path / "a.jsonl", *({"text": "many words " * 200} for _ in range(20))),
        tmp_path / "out",
    )
    found = subprocess.run(
        [sys.executable, preprocess_data.__file__, "--input", str(source), "--output-prefix", str(out / "d")],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert found.returncode == 2, found.stderr
    assert found.stderr.splitlines()[-1] == (
        f"preprocess_data.py: error: --output-prefix: cannot write {out / 'd'}: File too large"
    )
    assert "Traceback" not in found.stderr
    assert not [*out.iterdir()]
