#!/usr/bin/env python3
"""Makes Megatron's .bin/.idx datasets from text files or JSONL.

A text file is one document; a JSONL file has one document a line. Byte level, with no vocabulary to download:

    python tools/preprocess_data.py --input 'books/**/*.txt' --output-prefix data/books --append-eod
    ... pretrain_gpt.py --data-path data/books_text_document --tokenizer-type NullTokenizer --vocab-size 257

With a tokenizer of Megatron's, by the same flags as in training:

    python tools/preprocess_data.py --input wiki.jsonl --output-prefix data/wiki --append-eod --workers 8 \\
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model path/to/tokenizer
"""

from __future__ import annotations

import argparse
import glob
import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

BYTE_LEVEL = "ByteLevelTokenizer"
BYTE_LEVEL_EOD = 256  # after the 256 bytes; NullTokenizer's end of document at --vocab-size 257
_DOCUMENTS_A_TASK = 16  # enough that passing a document between processes costs little
_SECONDS_BETWEEN_REPORTS = 5.0


class InputError(ValueError):
    """What is wrong with the input or the flags, in one line."""


class Document(NamedTuple):
    """The texts of one document, one for each JSON key, and its size in the input, in bytes."""

    texts: tuple[str, ...]
    size: int


class Tokenizer(Protocol):
    """What is used of a Megatron tokenizer."""

    vocab_size: int
    eod: int

    def tokenize(self, text: str) -> list[int]: ...


# --- reading -----------------------------------------------------------------------------------------------


def input_files(patterns: Sequence[str]) -> list[Path]:
    """The files that ``patterns`` (paths, or globs where ``**`` goes down folders) name, each once.

    Raises:
        InputError: a pattern names no file.
    """
    files: dict[Path, None] = {}
    for pattern in patterns:
        if Path(pattern).is_file():
            files[Path(pattern)] = None
            continue
        matches = sorted(Path(name) for name in glob.glob(pattern, recursive=True) if Path(name).is_file())
        if not matches:
            why = (
                "is a folder; name its files, as in 'FOLDER/**/*.txt'"
                if Path(pattern).is_dir()
                else "no such file"
            )
            raise InputError(f"--input {pattern}: {why}")
        files.update(dict.fromkeys(matches))
    return list(files)


def is_jsonl(path: Path, input_format: str) -> bool:
    """Whether ``path`` is read as JSONL: by its suffix under ``auto``, else as ``input_format`` says."""
    return path.suffix in {".jsonl", ".json"} if input_format == "auto" else input_format == "jsonl"


def read_documents(files: Sequence[Path], input_format: str, keys: Sequence[str]) -> Iterator[Document]:
    """Yields the documents of ``files`` in order.

    Raises:
        InputError: a file cannot be read or is not UTF-8, a line is not a JSON object or lacks a key.
    """
    for path in files:
        try:
            if is_jsonl(path, input_format):
                yield from _read_jsonl(path, keys)
            else:
                data = path.read_bytes()
                yield Document((data.decode("utf-8-sig"),), len(data))
        except OSError as error:
            raise InputError(f"{path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise InputError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error


def _read_jsonl(path: Path, keys: Sequence[str]) -> Iterator[Document]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                raise InputError(f"{path}:{number}: not JSON: {error}") from error
            if not isinstance(record, dict):
                raise InputError(f"{path}:{number}: not a JSON object")
            texts = []
            for key in keys:
                text = record.get(key)
                if not isinstance(text, str):
                    what = (
                        "is not a string" if key in record else f"is missing; the keys are {sorted(record)}"
                    )
                    raise InputError(f"{path}:{number}: key {key!r} {what}")
                texts.append(text)
            yield Document(tuple(texts), len(line))


# --- tokenizing --------------------------------------------------------------------------------------------


def build_tokenizer(arguments: argparse.Namespace) -> Tokenizer:
    """The tokenizer that the flags ask for, built by Megatron's own factory.

    Raises:
        InputError: Megatron cannot build it.
    """
    try:
        if arguments.tokenizer_type == BYTE_LEVEL:
            from megatron.core.tokenizers import MegatronTokenizer

            return MegatronTokenizer.from_pretrained(
                metadata_path={"library": "byte-level"},
                vocab_size=BYTE_LEVEL_EOD + 1,
                _eos_id=BYTE_LEVEL_EOD,
                _pad_id=BYTE_LEVEL_EOD,
            )
        from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer as stock_build_tokenizer

        # The padding of the vocabulary is the model's affair, and depends on flags that are not asked for here.
        arguments.pad_vocab_size = False
        return stock_build_tokenizer(arguments)
    # Each library has its own kinds of error for a missing package, file or vocabulary: all are bad input here.
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"cannot build {arguments.tokenizer_type}: {reason[:300]}") from error


class Encoder:
    """Turns a document into token ids: for each key an array (tokens,) of the dataset's integer type.

    Args:
        tokenizer: gives the ids and the end-of-document token.
        dtype: integer type of the dataset.
        append_eod: end each document with the end-of-document token.
    """

    def __init__(self, tokenizer: Tokenizer, dtype: type[np.number[Any]], append_eod: bool) -> None:
        self._tokenizer = tokenizer
        self._dtype = dtype
        self._append_eod = append_eod

    def __call__(self, document: Document) -> tuple[list[np.ndarray], int]:
        """Returns the ids of each text (none for an empty text), and the document's size in bytes."""
        encoded = []
        for text in document.texts:
            ids = self._tokenizer.tokenize(text)
            if ids and self._append_eod:
                ids = [*ids, self._tokenizer.eod]
            encoded.append(np.asarray(ids, dtype=self._dtype))
        return encoded, document.size


# The forked workers find the encoder here: a tokenizer need not survive pickling.
_worker_encoder: list[Encoder] = []


def _encode_in_worker(document: Document) -> tuple[list[np.ndarray], int]:
    return _worker_encoder[0](document)


def encode_all(
    documents: Iterator[Document], encoder: Encoder, workers: int
) -> Iterator[tuple[list[np.ndarray], int]]:
    """Yields what ``encoder`` makes of each document, in order, computed by ``workers`` processes."""
    if workers == 1:
        yield from map(encoder, documents)
        return
    # Pool.imap would read the whole input ahead of the workers, so the reader waits for a place in the queue.
    places = threading.BoundedSemaphore(workers * _DOCUMENTS_A_TASK * 4)

    def paced() -> Iterator[Document]:
        for document in documents:
            places.acquire()
            yield document

    _worker_encoder[:] = [encoder]
    try:
        with multiprocessing.get_context("fork").Pool(workers) as pool:
            for result in pool.imap(_encode_in_worker, paced(), chunksize=_DOCUMENTS_A_TASK):
                places.release()
                yield result
    finally:
        _worker_encoder.clear()


# --- writing -----------------------------------------------------------------------------------------------


class DatasetWriter:
    """One .bin/.idx pair, which appears under its name only when it is whole.

    Args:
        prefix: path without suffix.
        dtype: integer type of the token ids.
    """

    def __init__(self, prefix: Path, dtype: type[np.number[Any]]) -> None:
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

        self.prefix = prefix
        self.documents = 0
        self.tokens = 0
        self._partial = prefix.with_name(prefix.name + ".partial")
        self._builder: IndexedDatasetBuilder = IndexedDatasetBuilder(f"{self._partial}.bin", dtype=dtype)

    def add(self, ids: np.ndarray) -> None:
        """Adds a document of token ids (tokens,); an empty one is left out, as Megatron has no use for it."""
        if len(ids):
            self._builder.add_document(ids, [len(ids)])
            self.documents += 1
            self.tokens += len(ids)

    def finish(self) -> None:
        """Writes the index and gives both files their names.

        Raises:
            InputError: there was no document.
        """
        if not self.documents:
            raise InputError(f"nothing to write to {self.prefix}.bin: the input holds no text")
        self._builder.finalize(f"{self._partial}.idx")
        for suffix in (".bin", ".idx"):
            os.replace(f"{self._partial}{suffix}", f"{self.prefix}{suffix}")

    def discard(self) -> None:
        """Removes what :meth:`finish` did not make whole."""
        self._builder.data_file.close()
        for suffix in (".bin", ".idx"):
            Path(f"{self._partial}{suffix}").unlink(missing_ok=True)


def _report(documents: int, size: int, seconds: float) -> None:
    rate = size / 1e6 / max(seconds, 1e-9)
    print(f"  {documents} documents, {size / 1e6:.1f} MB, {rate:.1f} MB/s", file=sys.stderr, flush=True)


def preprocess(arguments: argparse.Namespace) -> list[DatasetWriter]:
    """Does what the flags ask for and returns the datasets written, one a JSON key.

    Raises:
        InputError: something about the input or the flags is wrong; no dataset was written then.
    """
    files = input_files(arguments.input)
    keys = arguments.json_keys
    if keys != ["text"] and not all(is_jsonl(path, arguments.input_format) for path in files):
        raise InputError(
            "--json-keys is for JSONL, and the input has text files (--input-format says otherwise)"
        )
    prefix = Path(arguments.output_prefix)
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--output-prefix {prefix}: {error.strerror}") from error

    tokenizer = build_tokenizer(arguments)
    from megatron.core.datasets.indexed_dataset import DType

    dtype = DType.optimal_dtype(tokenizer.vocab_size)
    encoder = Encoder(tokenizer, dtype, arguments.append_eod)
    documents = read_documents(files, arguments.input_format, keys)
    count = size = 0
    started = reported = time.monotonic()
    writers: list[DatasetWriter] = []
    try:
        for key in keys:
            writers.append(DatasetWriter(prefix.with_name(f"{prefix.name}_{key}_document"), dtype))
        for encoded, document_size in encode_all(documents, encoder, arguments.workers):
            for writer, ids in zip(writers, encoded, strict=True):
                writer.add(ids)
            count += 1
            size += document_size
            if time.monotonic() - reported > _SECONDS_BETWEEN_REPORTS:
                reported = time.monotonic()
                _report(count, size, reported - started)
        for writer in writers:
            writer.finish()
    except OSError as error:
        raise InputError(f"{error.filename or prefix}: {error.strerror}") from error
    finally:
        for writer in writers:
            writer.discard()
    _report(count, size, time.monotonic() - started)
    return writers


# --- the command line --------------------------------------------------------------------------------------


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Flags of this program and, unless byte level is enough, the tokenizer flags of Megatron's training."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    group = parser.add_argument_group("input and output")
    group.add_argument(
        "--input", nargs="+", required=True, metavar="FILE", help="text or JSONL files, or globs"
    )
    group.add_argument(
        "--input-format",
        choices=["auto", "text", "jsonl"],
        default="auto",
        help="auto (the default) takes .jsonl and .json for JSONL and all else for text",
    )
    group.add_argument(
        "--output-prefix", required=True, metavar="PREFIX", help="writes PREFIX_KEY_document.bin and .idx"
    )
    group.add_argument("--json-keys", nargs="+", default=["text"], metavar="KEY", help="default: text")
    group.add_argument(
        "--append-eod", action="store_true", help="end each document with the end-of-document token"
    )
    group.add_argument(
        "--workers", type=int, default=1, metavar="N", help="processes that tokenize; default: 1"
    )

    # Megatron's flags take seconds to import; byte level has none.
    chooser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    chooser.add_argument("--tokenizer-type", default=BYTE_LEVEL)
    chosen = chooser.parse_known_args(argv)[0].tokenizer_type
    if chosen == BYTE_LEVEL and not {"-h", "--help"}.intersection(argv):
        parser.add_argument("--tokenizer-type", choices=[BYTE_LEVEL], default=BYTE_LEVEL)
    else:
        _add_stock_tokenizer_flags(parser)
    arguments = parser.parse_args(argv)
    if arguments.workers < 1:
        parser.error(f"--workers must be at least 1, not {arguments.workers}")
    if len(set(arguments.json_keys)) < len(arguments.json_keys):
        parser.error("--json-keys names a key twice")
    return arguments


def _add_stock_tokenizer_flags(parser: argparse.ArgumentParser) -> None:
    from megatron.training.argument_utils import ArgumentGroupFactory
    from megatron.training.config import TokenizerConfig

    ArgumentGroupFactory(TokenizerConfig).build_group(parser, "tokenizer, as in Megatron's training")
    for action in parser._actions:
        if action.dest == "tokenizer_type":
            action.choices = [BYTE_LEVEL, *(action.choices or ())]
            action.default = BYTE_LEVEL
            action.help = f"default: {BYTE_LEVEL}, UTF-8 bytes and an end-of-document token (257 ids)"


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(sys.argv[1:] if argv is None else argv)
    # Workers do the parallel work; a tokenizer library that adds threads of its own warns after a fork.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        writers = preprocess(arguments)
    except InputError as error:
        print(f"preprocess_data.py: error: {error}", file=sys.stderr)
        return 2
    for writer in writers:
        print(f"{writer.prefix}.bin and .idx: {writer.documents} documents, {writer.tokens} tokens")
    flags = f"--tokenizer-type {arguments.tokenizer_type}"
    if arguments.tokenizer_type == BYTE_LEVEL:
        flags = f"--tokenizer-type NullTokenizer --vocab-size {BYTE_LEVEL_EOD + 1}"
    print(f"train with: --data-path {writers[0].prefix} {flags}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
