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
import itertools
import json
import logging
import multiprocessing
import os
import re
import sys
import time
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.schedules.utils.child_processes import begin_worker
from megatron.schedules.utils.errors import one_line
from megatron.schedules.utils.printable import printable
from tools._parsing import Parser

BYTE_LEVEL = "ByteLevelTokenizer"
BYTE_LEVEL_EOD = 256  # after the 256 bytes; NullTokenizer's end of document at --vocab-size 257
# Megatron's tokenizers that do not read text: numbers, pictures, conversations.
_NOT_FOR_TEXT = frozenset({"NullTokenizer", "NullMultimodalTokenizer", "MultimodalTokenizer", "SFTTokenizer"})
_DOCUMENTS_A_TASK = 16  # enough that passing documents between processes costs little
_SECONDS_BETWEEN_REPORTS = 5.0
_MOST_WORKERS = 1024  # more is a slip of the finger, and each is a process
_LONGEST = 2**28  # bytes of a document; a file without line ends would be read into memory whole
_HALF_A_SURROGATE_PAIR = re.compile("[\ud800-\udfff]")  # JSON can spell it, UTF-8 cannot


class InputError(ValueError):
    """A fault of the input or the flags, in one line."""


class Document(NamedTuple):
    """The texts of one document, one for each JSON key, and its size in the input, in bytes."""

    texts: tuple[str, ...]
    size: int


class Encoded(NamedTuple):
    """The token ids (tokens,) of each text of a document, and its size in the input, in bytes."""

    ids: tuple[np.ndarray, ...]
    size: int


class Tokenizer(Protocol):
    """The used part of a Megatron tokenizer."""

    vocab_size: int
    eod: int

    def tokenize(self, text: str) -> list[int]: ...


# --- reading -----------------------------------------------------------------------------------------------


def input_files(patterns: Sequence[str]) -> list[Path]:
    """Returns the files of ``patterns`` (paths, or globs where ``**`` matches folders), each once.

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
            is_folder = "is a folder; name its files, as in 'FOLDER/**/*.txt'"
            raise InputError(f"--input {pattern}: {is_folder if Path(pattern).is_dir() else 'no such file'}")
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
                with path.open("rb") as file:
                    data = file.read(_LONGEST + 1)
                if len(data) > _LONGEST:
                    raise InputError(f"--input {path}: a text of more than {_LONGEST >> 20} MiB; each is one document")
                yield Document((data.decode("utf-8-sig"),), len(data))
        except OSError as error:
            raise InputError(f"--input {path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise InputError(f"--input {path} is not UTF-8 text: {error.reason} at byte {error.start}") from error


def _read_jsonl(path: Path, keys: Sequence[str]) -> Iterator[Document]:
    with path.open("rb") as file:
        for number, line in enumerate(iter(partial(file.readline, _LONGEST + 1), b""), start=1):
            where = f"--input {path}:{number}"
            if len(line) > _LONGEST:
                raise InputError(f"{where}: a line of more than {_LONGEST >> 20} MiB; each is one JSON object")
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except UnicodeDecodeError as error:
                raise InputError(f"{where}: not UTF-8 text") from error
            except (ValueError, RecursionError) as error:
                raise InputError(f"{where}: not JSON: {error}") from error
            if not isinstance(record, dict):
                raise InputError(f"{where}: not a JSON object")
            for key in keys:
                if key not in record:
                    raise InputError(
                        f"{where}: no key {key!r}; the keys are {', '.join(sorted(record))}: choose by --json-keys"
                    )
                if not isinstance(record[key], str):
                    raise InputError(f"{where}: the value of {key!r} is not a string")
                if _HALF_A_SURROGATE_PAIR.search(record[key]):
                    raise InputError(f"{where}: {key!r} holds half a surrogate pair, which is no text")
            yield Document(tuple(record[key] for key in keys), len(line))


# --- tokenizing --------------------------------------------------------------------------------------------


def build_tokenizer(arguments: argparse.Namespace) -> Tokenizer:
    """Builds the tokenizer of the flags, by Megatron's own factory.

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
        from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer as build_stock_tokenizer

        # Padding the vocabulary is the model's affair, and depends on flags that are not asked for here.
        arguments.pad_vocab_size = False
        return build_stock_tokenizer(arguments)
    # Each library has its own errors for a missing package, file or vocabulary: all are bad input here.
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"cannot build {arguments.tokenizer_type}: {reason[:300]}") from error


class Encoder:
    """Turns a document into token ids of the dataset's integer type.

    Args:
        tokenizer: gives the ids and the end-of-document token.
        dtype: integer type of the dataset.
        append_eod: end each document with the end-of-document token.
    """

    def __init__(self, tokenizer: Tokenizer, dtype: type[np.number[Any]], append_eod: bool) -> None:
        self._tokenizer = tokenizer
        self._dtype = dtype
        self._append_eod = append_eod

    def __call__(self, document: Document) -> Encoded:
        """Returns the ids of each text of ``document``; none for an empty text."""
        return Encoded(tuple(map(self._ids, document.texts)), document.size)

    def _ids(self, text: str) -> np.ndarray:
        ids = self._tokenizer.tokenize(text)
        if ids and self._append_eod:
            ids = [*ids, self._tokenizer.eod]
        return np.asarray(ids, dtype=self._dtype)


def encode_all(documents: Iterator[Document], encoder: Encoder, workers: int) -> Iterator[Encoded]:
    """Yields each document encoded, in order, computed by ``workers`` processes."""
    if workers == 1:
        yield from map(encoder, documents)
        return
    # Forked, so that a tokenizer need not survive pickling. Only so many batches are under way at a time:
    # the input may be larger than memory.
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(workers, context, initializer=_adopt, initargs=(encoder,))
    try:
        under_way: deque[Future[list[Encoded]]] = deque()
        for batch in itertools.batched(documents, _DOCUMENTS_A_TASK):
            under_way.append(pool.submit(_encode_batch, batch))
            if len(under_way) == 4 * workers:
                yield from under_way.popleft().result()
        while under_way:
            yield from under_way.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)  # after an error or Ctrl-C only the batches that have begun are finished


_encoder_of_this_worker: Encoder


def _adopt(encoder: Encoder) -> None:
    """Stores the encoder in a worker process."""
    global _encoder_of_this_worker
    begin_worker()
    _encoder_of_this_worker = encoder


def _encode_batch(batch: Sequence[Document]) -> list[Encoded]:
    return list(map(_encoder_of_this_worker, batch))


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
        self._builder = IndexedDatasetBuilder(f"{self._partial}.bin", dtype=dtype)

    def add(self, ids: np.ndarray) -> None:
        """Adds a document of token ids (tokens,); an empty one is left out, as Megatron has no use for it."""
        if len(ids):
            self._builder.add_document(ids, [len(ids)])
            self.documents += 1
            self.tokens += len(ids)

    def finish(self) -> None:
        """Writes the index and gives both files their names."""
        self._builder.finalize(f"{self._partial}.idx")
        for suffix in (".bin", ".idx"):
            os.replace(f"{self._partial}{suffix}", f"{self.prefix}{suffix}")

    def discard(self) -> None:
        """Removes what :meth:`finish` did not make whole."""
        with suppress(OSError):  # a full disk, where something is left to be written
            self._builder.data_file.close()
        for suffix in (".bin", ".idx"):
            Path(f"{self._partial}{suffix}").unlink(missing_ok=True)


def _report(documents: int, size: int, seconds: float) -> None:
    rate = size / 1e6 / max(seconds, 1e-9)
    print(f"  {documents} documents, {size / 1e6:.1f} MB, {rate:.1f} MB/s", file=sys.stderr, flush=True)


def preprocess(arguments: argparse.Namespace) -> list[DatasetWriter]:
    """Writes the datasets and returns them, one for each JSON key.

    Raises:
        InputError: something about the input or the flags is wrong; no dataset was written then.
    """
    files = input_files(arguments.input)
    keys = arguments.json_keys
    if keys != ["text"] and not all(is_jsonl(path, arguments.input_format) for path in files):
        raise InputError("--json-keys is for JSONL, but some input is text (see --input-format)")
    prefix = Path(arguments.output_prefix)
    tokenizer = build_tokenizer(arguments)
    from megatron.core.datasets.indexed_dataset import DType

    dtype = DType.optimal_dtype(tokenizer.vocab_size)
    documents = read_documents(files, arguments.input_format, keys)
    encoder = Encoder(tokenizer, dtype, arguments.append_eod)
    count = size = 0
    started = reported = time.monotonic()
    writers: list[DatasetWriter] = []
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        for key in keys:
            writers.append(DatasetWriter(prefix.with_name(f"{prefix.name}_{key}_document"), dtype))
        for encoded in encode_all(documents, encoder, arguments.workers):
            for writer, ids in zip(writers, encoded.ids, strict=True):
                writer.add(ids)
            count += 1
            size += encoded.size
            if time.monotonic() - reported > _SECONDS_BETWEEN_REPORTS:
                reported = time.monotonic()
                _report(count, size, reported - started)
        for key, writer in zip(keys, writers, strict=True):
            if not writer.documents:
                raise InputError(f"--input holds no text under {key!r}: nothing to write")
        for writer in writers:
            writer.finish()
    except OSError as error:
        raise InputError(f"--output-prefix: cannot write {error.filename or prefix}: {error.strerror}") from error
    finally:
        for writer in writers:
            writer.discard()
    _report(count, size, time.monotonic() - started)
    return writers


# --- the command line --------------------------------------------------------------------------------------


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parses the flags of this program and, unless byte level is used, the tokenizer flags of Megatron's training."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument_group("input and output").add_argument
    add("--input", nargs="+", required=True, metavar="FILE", help="text files, JSONL files, globs")
    formats = ["auto", "text", "jsonl"]
    add(
        "--input-format",
        choices=formats,
        default="auto",
        help="auto: .jsonl and .json are JSONL, all else text",
    )
    add("--output-prefix", required=True, metavar="PREFIX", help="writes PREFIX_KEY_document.bin and .idx")
    add("--json-keys", nargs="+", default=["text"], metavar="KEY", help="default: text")
    add("--append-eod", action="store_true", help="end each document with the end-of-document token")
    add("--workers", type=int, default=1, metavar="N", help="processes that tokenize; default: 1")

    # Megatron's flags take seconds to import: they are read, and listed by --help, only for one of its tokenizers.
    chooser = Parser(add_help=False, allow_abbrev=False)
    chooser.add_argument("--tokenizer-type", default=BYTE_LEVEL)
    chosen = chooser.parse_known_args(argv)[0].tokenizer_type
    if chosen == BYTE_LEVEL:
        about = (
            f"{BYTE_LEVEL} (default: UTF-8 bytes and an end-of-document token, 257 ids), or one of Megatron's, whose "
        )
        about += "flags --tokenizer-type HuggingFaceTokenizer --help lists"
        parser.add_argument("--tokenizer-type", choices=[BYTE_LEVEL], default=BYTE_LEVEL, metavar="NAME", help=about)
    else:
        _add_stock_tokenizer_flags(parser)
    arguments = parser.parse_args(argv)
    if arguments.workers < 1:
        parser.error(f"--workers must be at least 1, not {arguments.workers}")
    if arguments.workers > _MOST_WORKERS:
        parser.error(f"--workers must be at most {_MOST_WORKERS}, not {arguments.workers}")
    for flag, words in (("--output-prefix", [arguments.output_prefix]), ("--json-keys", arguments.json_keys)):
        if any(map(_HALF_A_SURROGATE_PAIR.search, words)):
            parser.error(f"{flag} holds half a surrogate pair, which is no text")
    if not Path(arguments.output_prefix).name:
        parser.error(f"--output-prefix {arguments.output_prefix!r} names a folder: add the beginning of a file's name")
    if len(set(arguments.json_keys)) < len(arguments.json_keys):
        parser.error("--json-keys names a key twice")
    return arguments


def _add_stock_tokenizer_flags(parser: argparse.ArgumentParser) -> None:
    from megatron.training.argument_utils import ArgumentGroupFactory
    from megatron.training.config import TokenizerConfig

    group = ArgumentGroupFactory(TokenizerConfig).build_group(parser, "tokenizer, as in Megatron's training")
    for action in group._group_actions:
        if action.dest == "tokenizer_type":
            action.choices = [BYTE_LEVEL, *(name for name in action.choices if name not in _NOT_FOR_TEXT)]
            action.default = BYTE_LEVEL
            action.help = f"default: {BYTE_LEVEL}, UTF-8 bytes and an end-of-document token (257 ids)"


def main(argv: Sequence[str] | None = None) -> int:
    # Megatron and torch say at import what this machine lacks: no matter for tokenizing.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    # The workers are the parallelism; a library that adds threads of its own would warn after each fork.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    arguments = parse_arguments(sys.argv[1:] if argv is None else argv)
    try:
        writers = preprocess(arguments)
    except InputError as error:
        print(f"preprocess_data.py: error: {one_line(str(error))}", file=sys.stderr)
        return 2
    except BrokenProcessPool:
        print("preprocess_data.py: error: a worker was killed, perhaps for want of memory", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    for writer in writers:
        print(f"{printable(str(writer.prefix))}.bin and .idx: {writer.documents} documents, {writer.tokens} tokens")
    flags = f"--tokenizer-type {arguments.tokenizer_type}"
    if arguments.tokenizer_type == BYTE_LEVEL:
        flags = f"--tokenizer-type NullTokenizer --vocab-size {BYTE_LEVEL_EOD + 1}"
    print(f"train with: --data-path {printable(str(writers[0].prefix))} {flags}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
