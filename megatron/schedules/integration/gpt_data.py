"""What data flags mean for samples, checks of those that :mod:`.gpt` does not support, and the files they name.

All without Megatron.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.schedules.integration.refuse import refuse
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.json_files import Index, decode, read_file

# Flags for other kinds of samples.
_OTHER_DATA = ("--fim-data", "--hybrid-context-parallel")
_SEQUENCES = "--per-dataset-sequences-path"
_POSITIONS, _LAYOUT = "--position-embedding-type", "--pipeline-model-parallel-layout"


def packs(args: Any) -> bool:
    """Returns whether a sample packs several sequences, each of which attends only to itself."""
    return bool(args.sft or args.dataloader_inter_document_masking)


def masks_documents(args: Any) -> bool:
    """Returns whether a sample's mask keeps its documents apart.

    Attention takes such a mask on every stage. Without one it sees all earlier tokens.
    """
    return bool(args.reset_attention_mask and args.create_attention_mask_in_dataloader and not packs(args))


def refuse_other_data(argv: Sequence[str]) -> None:
    """Exits with status 2 and one line if a flag requests data that :func:`.gpt.forward_step` does not support."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in (*_OTHER_DATA, "--sft", "--dataloader-inter-document-masking", "--mock-data"):
        parser.add_argument(flag, action="store_true")
    for flag in ("--micro-batch-size", "--context-parallel-size"):
        parser.add_argument(flag, type=int, default=1)
    parser.add_argument(_SEQUENCES, type=Path)
    parser.add_argument(_POSITIONS)
    parser.add_argument(_LAYOUT, default="")
    given, _ = parser.parse_known_args(argv)
    for flag in _OTHER_DATA:
        if flag in argv:
            refuse(f"{flag} is not supported here: this program reads plain GPT samples; leave the flag out")
    if given.position_embedding_type == "mrope":
        refuse(f"{_POSITIONS} mrope needs three positions for each token, and plain GPT samples have one: give rope")
    layout = given.pipeline_model_parallel_layout
    if "m" in layout.rpartition("|")[0]:
        refuse(
            f"{_LAYOUT} {layout!r}: a stage of multi-token prediction in the middle would get no tokens here; write "
            "every m before the L"
        )
    if given.sft and given.mock_data:
        refuse("--sft needs conversations: give --data-path rather than --mock-data")
    packed = given.sft or given.dataloader_inter_document_masking
    if packed and given.micro_batch_size > 1:
        refuse("packed sequences go one sample at a time: give --micro-batch-size 1 and a longer --seq-length")
    if packed and given.context_parallel_size > 1:
        refuse("packed sequences do not work with --context-parallel-size above 1 here; leave the flag out")
    if given.per_dataset_sequences_path is not None:
        sequences_per_dataset(given.per_dataset_sequences_path)


def sequences_per_dataset(path: Path) -> dict[str, tuple[int, int]]:
    """Numbers of sequences and documents of each data set, by path, from the JSON file ``path``.

    Exits with status 2 and one line if the file is invalid.
    """
    writers = "tools/build_sequences_per_dataset.py of Megatron-LM writes such files"
    try:
        return read_file(path, None, "list of data sets", writers, lambda text: decode(text, _Datasets))
    except PlanError as error:
        refuse(f"{_SEQUENCES}: {error}")


_Datasets = dict[str, tuple[Index, Index]]
