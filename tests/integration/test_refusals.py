"""Bad requests end in one line and status 2 before any process starts work."""

from __future__ import annotations

import argparse
import difflib
import json
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from megatron.schedules.estimate import megatron_flags
from megatron.schedules.integration.flags.checks import LIKE, refuse_early
from megatron.schedules.integration.flags.declared import OURS, STOCK
from megatron.schedules.job.flags import SEARCH_VARIABLE, STALL_VARIABLE
from megatron.schedules.planner.registry import Request, plan
from megatron.schedules.schedule.text_forms import to_csv
from tests.integration.results import MODEL, flags_of
from tests.tiers import some_by_night

ROOT = Path(__file__).resolve().parents[2]
JOB = [*MODEL, "--train-iters", "1"]
PP4 = "--global-batch-size 4 --pipeline-model-parallel-size 4".split()

REFUSED = {
    "an unknown schedule, with what was meant": ("--pipeline-schedule v-haff", "did you mean v-half?"),
    "a schedule in capitals": ("--pipeline-schedule V-HALF", "unknown schedule 'V-HALF': did you mean v-half?"),
    "a misspelt flag": (
        "--pipeline-shedule v-half",
        "--pipeline-shedule is unknown: did you mean --pipeline-schedule?",
    ),
    "another misspelt flag": (
        "--pipeline-schedule adaptive --pipline-memory-limit=0.5",
        "--pipline-memory-limit is unknown: did you mean --pipeline-memory-limit?",
    ),
    "a schedule without a name": (
        "--pipeline-schedule=",
        "--pipeline-schedule: unknown schedule '': use one of auto, 1f1b",
    ),
    "costs without a schedule": (
        "--pipeline-costs 1,2,3",
        "--pipeline-costs goes with --pipeline-schedule: name one of auto, 1f1b",
    ),
    "a limit without a schedule": (
        "--pipeline-memory-limit 0.8 --pipeline-costs 1,2,3",
        "--pipeline-memory-limit goes with --pipeline-schedule adaptive or auto, which is missing",
    ),
    "a way to save memory without a schedule": (
        "--pipeline-save-memory recompute",
        "--pipeline-save-memory recompute goes with --pipeline-schedule adaptive or auto, which is missing",
    ),
    "a dry run without a schedule": (
        "--pipeline-dry-run",
        "--pipeline-dry-run goes with --pipeline-schedule: name one of auto, 1f1b",
    ),
    "a dry run on no GPUs": (
        "--pipeline-schedule v-half --pipeline-dry-run 0",
        "--pipeline-dry-run 0 is too small: the number of GPUs that the job would have",
    ),
    "a dry run of words": (
        "--pipeline-schedule v-half --pipeline-dry-run many",
        "--pipeline-dry-run 'many' is not a whole number: the number of GPUs that the job would have",
    ),
    "a dry run of what looks like a flag": (
        "--pipeline-schedule v-half --pipeline-dry-run -1GiB",
        "--pipeline-dry-run '-1GiB' is not a whole number: the number of GPUs that the job would have",
    ),
    "a device's memory without a unit": (
        "--pipeline-schedule v-half --pipeline-dry-run 8x80",
        "--pipeline-dry-run 8x '80' has no unit: write it such as 80GiB",
    ),
    "a device without memory": (
        "--pipeline-schedule v-half --pipeline-dry-run x0GiB",
        "--pipeline-dry-run x 0 is not above zero: a size such as 80GiB is needed",
    ),
    "a shared vocabulary without a schedule": (
        "--pipeline-vocabulary-parallel",
        "--pipeline-vocabulary-parallel goes with --pipeline-schedule: name one of auto, 1f1b",
    ),
    "a shared vocabulary and multi-token prediction": (
        "--pipeline-schedule 1f1b --pipeline-vocabulary-parallel --mtp-num-layers 1",
        "the vocabulary cannot be shared with multi-token prediction",
    ),
    "a shared vocabulary in the old format": (
        "--pipeline-schedule 1f1b --pipeline-vocabulary-parallel --ckpt-format torch",
        "with --pipeline-vocabulary-parallel does not work with --ckpt-format torch",
    ),
    "a shared vocabulary of weights not yet made": (
        "--pipeline-schedule 1f1b --pipeline-vocabulary-parallel --init-model-with-meta-device",
        "with --pipeline-vocabulary-parallel does not work with --init-model-with-meta-device",
    ),
    "a shared vocabulary in packed samples": (
        "--pipeline-schedule 1f1b --pipeline-vocabulary-parallel --dataloader-inter-document-masking",
        "with --pipeline-vocabulary-parallel does not work with --dataloader-inter-document-masking",
    ),
    "a shared vocabulary and scaled logits": (
        "--pipeline-schedule 1f1b --pipeline-vocabulary-parallel --use-mup",
        "with --pipeline-vocabulary-parallel does not work with --use-mup",
    ),
    "a shared vocabulary that cannot be cut": (
        "--pipeline-schedule 1f1b --pipeline-vocabulary-parallel --padded-vocab-size 98",
        "with --pipeline-vocabulary-parallel has 98 words as padded, which do not divide by tensor x pipeline "
        "parallel = 4",
    ),
    "plans for lengths without a schedule": (
        "--pipeline-plan-lengths",
        "--pipeline-plan-lengths goes with --pipeline-schedule: name one of auto, 1f1b",
    ),
    "plans for lengths where replicas share experts": (
        "--pipeline-schedule v-half --pipeline-plan-lengths --expert-model-parallel-size 2",
        "--pipeline-plan-lengths does not go with --expert-model-parallel-size above 1",
    ),
    "plans for lengths of a data loader of one's own": (
        "--pipeline-schedule v-half --pipeline-plan-lengths --dataloader-type external",
        "--pipeline-plan-lengths does not go with --dataloader-type external",
    ),
    "plans for lengths across phases": (
        "--pipeline-schedule v-half --pipeline-plan-lengths --phase-transition-iterations 5",
        "--pipeline-plan-lengths does not go with --phase-transition-iterations",
    ),
    "plans for lengths and a shared vocabulary": (
        "--pipeline-schedule 1f1b --pipeline-plan-lengths --pipeline-vocabulary-parallel",
        "--pipeline-plan-lengths does not go with --pipeline-vocabulary-parallel",
    ),
    "plans for lengths and recompute": (
        "--pipeline-schedule adaptive --pipeline-memory-limit 0.5 --pipeline-plan-lengths --pipeline-save-memory "
        "recompute",
        "--pipeline-plan-lengths does not go with --pipeline-save-memory so far",
    ),
    "plans for lengths and a plan made again": (
        "--pipeline-schedule v-half --pipeline-plan-lengths --pipeline-replan",
        "--pipeline-plan-lengths does not go with --pipeline-replan",
    ),
    "plans for lengths and a profile": (
        "--pipeline-schedule v-half --pipeline-plan-lengths --pipeline-measure out:2-4",
        "--pipeline-plan-lengths does not go with --pipeline-measure",
    ),
    "plans for lengths in what memory is left": (
        "--pipeline-schedule adaptive --pipeline-memory-limit auto --pipeline-plan-lengths",
        "--pipeline-plan-lengths does not go with --pipeline-memory-limit auto",
    ),
    "V without a pipeline": ("--pipeline-schedule v-half --pipeline-model-parallel-size 1", "size 2 or more, not 1"),
    "layers that do not divide": ("--pipeline-schedule v-half --num-layers 12", "--num-layers must be a multiple of 8"),
    "layers that do not divide, with what divides them": (
        "--pipeline-schedule v-half --num-layers 12",
        "use 8 or 16, not 12; or give --pipeline-layers auto, which divides any number of layers",
    ),
    "layers of a pipeline alone that do not divide": (
        "--pipeline-schedule 1f1b --num-layers 7",
        "has 4 stages: --num-layers must be a multiple of 4; use 4 or 8, not 7; or give --pipeline-layers auto",
    ),
    "fewer layers than stages": ("--pipeline-schedule v-half --num-layers 3", "a multiple of 8; use 8, not 3"),
    "no microbatch": ("--pipeline-schedule v-half --global-batch-size 0", "gives 0 microbatches"),
    "part of a microbatch": ("--pipeline-schedule v-half --micro-batch-size 3", "--global-batch-size 4 gives 1.3"),
    "steps of batch size that are none": (
        "--pipeline-schedule v-half --step-batch-size-schedule eight",
        "'eight' is not a list of TOKENS:BATCH",
    ),
    "steps of batch size that do not divide": (
        "--pipeline-schedule v-half --micro-batch-size 3 --step-batch-size-schedule 0:4,1K:8",
        "--step-batch-size-schedule 4 gives 1.3",
    ),
    "FSDP": ("--pipeline-schedule v-half --use-megatron-fsdp", "--use-megatron-fsdp"),
    "experts' messages behind computing": (
        "--pipeline-schedule 1f1b-v --overlap-moe-expert-parallel-comm",
        "this schedule does not split the backward, so no weight gradients are left to run behind messages",
    ),
    "weight gradients delayed in whole backwards": (
        "--pipeline-schedule interleaved-1f1b --delay-wgrad-compute",
        "does not work with --delay-wgrad-compute: this schedule does not split the backward",
    ),
    "shared experts behind the same messages": (
        "--pipeline-schedule v-half --overlap-moe-expert-parallel-comm --num-experts 4 --expert-model-parallel-size 2 "
        "--moe-shared-expert-intermediate-size 64 --moe-shared-expert-overlap --moe-token-dispatcher-type alltoall",
        "with --overlap-moe-expert-parallel-comm does not work with --moe-shared-expert-overlap: both run behind the "
        "same messages; leave one of the two out",
    ),
    "no messages of experts behind computing": (
        "--pipeline-schedule v-half --overlap-moe-expert-parallel-comm --moe-token-dispatcher-type alltoall",
        "experts send no messages",
    ),
    "a hybrid model in other stages": (
        "--pipeline-schedule v-half --hybrid-layer-pattern M-|M-|*-|M-",
        "has 8 stages and --hybrid-layer-pattern 'M-|M-|*-|M-' has 4: write 8, in model order, with | between them",
    ),
    "a hybrid model that does not divide": (
        "--pipeline-schedule v-half --hybrid-layer-pattern M-M-*-M-M-/*-",
        "the number of layers in --hybrid-layer-pattern must be a multiple of 8; use 8 or 16, not 10; or write |",
    ),
    "a hybrid model of one chunk that does not divide": (
        "--pipeline-schedule zb-1p --hybrid-override-pattern M-M-*-",
        "the number of layers in --hybrid-layer-pattern must be a multiple of 4; use 4 or 8, not 6; or write |",
    ),
    "a hybrid model placed twice": (
        "--pipeline-schedule zb-1p --hybrid-layer-pattern M-|M-|*-|M- --pipeline-layers 2,2,2,2",
        "--pipeline-layers 2,2,2,2 places the layers itself: leave out",
    ),
    "a hybrid model with other layers than it has": (
        "--pipeline-schedule zb-1p --hybrid-layer-pattern M-M-*-M- --pipeline-layers 2,2,2,3",
        "has 8 layers (--hybrid-layer-pattern) and --pipeline-layers 2,2,2,3 has 9",
    ),
    "activation offloading": (
        "--pipeline-schedule v-half --fine-grained-activation-offloading",
        "it counts on Megatron's own schedule; use --pipeline-save-memory offload instead",
    ),
    "a layout of other stages": (
        "--pipeline-schedule v-half --pipeline-model-parallel-layout Et|t|t|tL --num-layers 4",
        "has 8 stages",
    ),
    "a layout of other layers": (
        "--pipeline-schedule zb-1p --pipeline-model-parallel-layout Et|t|t|tL",
        "holds 4 layers and --num-layers is 8",
    ),
    "a layout that is none": (
        "--pipeline-schedule zb-1p --pipeline-model-parallel-layout Et|x|t|tL",
        "cannot read --pipeline-model-parallel-layout",
    ),
    "ends that leave no even rest": (
        "--pipeline-schedule v-half --decoder-first-pipeline-num-layers 2",
        "--num-layers must be 2 + a multiple of 7, not 8",
    ),
    "Megatron's own CUDA graphs of layers": (
        "--pipeline-schedule zb-1p --cuda-graph-impl local",
        "--pipeline-schedule zb-1p does not work with --cuda-graph-impl local: its graphs of layers have no weight "
        "gradients that a plan places; use transformer_engine or full_iteration, or leave the flag out",
    ),
    "CUDA graphs by their old flag": (
        "--pipeline-schedule zb-1p --enable-cuda-graph",
        "does not work with --enable-cuda-graph: its graphs of layers have no weight gradients that a plan places",
    ),
    "a CUDA graph of iterations that recompute": (
        "--pipeline-schedule adaptive --pipeline-memory-limit 0.4 --pipeline-save-memory recompute --cuda-graph-impl "
        "full_iteration",
        "--cuda-graph-impl full_iteration does not go with --pipeline-save-memory: a graph neither recomputes nor",
    ),
    "a CUDA graph of iterations that are measured": (
        "--pipeline-schedule v-half --pipeline-measure out --train-iters 9 --cuda-graph-impl full_iteration",
        "--cuda-graph-impl full_iteration does not go with --pipeline-measure: a graph of a whole iteration has no "
        "clocks; leave one of the two out",
    ),
    "a CUDA graph of iterations with several plans": (
        "--pipeline-schedule adaptive --pipeline-memory-limit 1 --pipeline-replan --cuda-graph-impl full_iteration",
        "--cuda-graph-impl full_iteration does not go with --pipeline-replan: graphs are captured once, in the order",
    ),
    "a CUDA graph of an iteration that is verified": (
        "--pipeline-schedule v-half --pipeline-verify --cuda-graph-impl full_iteration",
        "--cuda-graph-impl full_iteration does not go with --pipeline-verify: the iteration that it verifies comes",
    ),
    "a CUDA graph of iterations of any shape": (
        "--pipeline-schedule v-half --dataloader-inter-document-masking --cuda-graph-impl full_iteration",
        "does not go with --dataloader-inter-document-masking: the host reads their lengths, and in a graph no host",
    ),
    "a CUDA graph of iterations in fp16": (
        "--pipeline-schedule v-half --fp16 --cuda-graph-impl full_iteration",
        "--cuda-graph-impl full_iteration does not go with --fp16: a graph repeats the loss scale that it was captured "
        "with; use bf16; leave one of the two out",
    ),
    "a CUDA graph of the first iteration": (
        "--pipeline-schedule v-half --cuda-graph-impl full_iteration --cuda-graph-warmup-steps 0",
        "--cuda-graph-impl full_iteration needs --cuda-graph-warmup-steps 1 or more: ranks tell each other about the",
    ),
    "a CUDA graph of iterations that are timed": (
        "--pipeline-schedule v-half --timing-log-level 1 --cuda-graph-impl full_iteration",
        "--cuda-graph-impl full_iteration does not go with --timing-log-level: a graph of a whole iteration has no",
    ),
    "a limit to experts' tokens in iterations that are measured": (
        "--pipeline-schedule v-half --pipeline-measure out --train-iters 9 --moe-expert-rank-capacity-factor 1.5",
        "--moe-expert-rank-capacity-factor does not go with --pipeline-measure: an iteration with too many tokens for "
        "an expert is run again; leave one of the two out",
    ),
    "a limit to experts' tokens and several plans": (
        "--pipeline-schedule v-half --rampup-batch-size 4 4 8 --moe-expert-rank-capacity-factor 1.5",
        "--moe-expert-rank-capacity-factor does not go with --rampup-batch-size: it notes the order of one plan",
    ),
    "a limit to experts' tokens in an iteration that is verified": (
        "--pipeline-schedule v-half --pipeline-verify --moe-expert-rank-capacity-factor 1.5",
        "--moe-expert-rank-capacity-factor does not go with --pipeline-verify: it would note two orders",
    ),
    "a CUDA graph of iterations with experts of any size": (
        "--pipeline-schedule v-half --num-experts 4 --cuda-graph-impl full_iteration",
        "--cuda-graph-impl full_iteration does not go with experts whose number of tokens the host reads: give "
        "--moe-expert-capacity-factor with --moe-pad-expert-input-to-capacity, or leave the flag out",
    ),
    "CUDA graphs and several plans": (
        "--pipeline-schedule adaptive --pipeline-memory-limit 1 --pipeline-replan --cuda-graph-impl transformer_engine",
        "--cuda-graph-impl transformer_engine does not go with --pipeline-replan: graphs are captured once, in the "
        "order of one plan for one number of microbatches; leave one of the two out",
    ),
    "CUDA graphs and a limit to measure": (
        "--pipeline-schedule adaptive --pipeline-memory-limit auto --cuda-graph-impl transformer_engine",
        "--cuda-graph-impl transformer_engine does not go with --pipeline-memory-limit auto: graphs are captured once",
    ),
    "CUDA graphs and plans for lengths": (
        "--pipeline-schedule v-half --pipeline-plan-lengths --external-cuda-graph",
        "--cuda-graph-impl transformer_engine does not go with --pipeline-plan-lengths: graphs are captured once",
    ),
    "CUDA graphs and a growing batch": (
        "--pipeline-schedule v-half --rampup-batch-size 4 4 8 --cuda-graph-impl transformer_engine",
        "--cuda-graph-impl transformer_engine does not go with --rampup-batch-size: graphs are captured once",
    ),
    "CUDA graphs that are not verified": (
        "--pipeline-schedule v-half --pipeline-verify --cuda-graph-impl transformer_engine",
        "--cuda-graph-impl transformer_engine does not go with --pipeline-verify: the iteration that it verifies comes "
        "before the graphs",
    ),
    "CUDA graphs and memory saving": (
        "--pipeline-schedule adaptive --pipeline-memory-limit 0.5 --pipeline-save-memory recompute --cuda-graph-impl "
        "transformer_engine",
        "does not go with --pipeline-save-memory: a graph neither recomputes nor offloads",
    ),
    "CUDA graphs of packed samples": (
        "--pipeline-schedule v-half --dataloader-inter-document-masking --cuda-graph-impl transformer_engine",
        "does not go with --dataloader-inter-document-masking: a graph is for microbatches of one shape",
    ),
    "CUDA graphs in fp16": (
        "--pipeline-schedule v-half --fp16 --cuda-graph-impl transformer_engine",
        "--cuda-graph-impl transformer_engine needs --bf16: Megatron makes the inputs of graphs in bf16",
    ),
    "CUDA graphs of wider residual streams": (
        "--pipeline-schedule v-half --bf16 --fp32-residual-connection --cuda-graph-impl transformer_engine",
        "--cuda-graph-impl transformer_engine does not go with --fp32-residual-connection: Megatron makes the inputs",
    ),
    "linears it cannot split": (
        "--pipeline-schedule zb-1p --transformer-impl transformer_engine",
        "--transformer-impl",
    ),
    "stock's chunks": ("--pipeline-schedule v-half --num-virtual-stages-per-pipeline-rank 2", "leave the flag out"),
    "costs that are no numbers": (
        "--pipeline-schedule v-half --pipeline-costs 1,2",
        "--pipeline-costs: costs are F,I,W[,LATENCY[,MESSAGES]], three to five numbers such as 1,1.1,0.75,0.05, not "
        "'1,2'; or name a FILE.json",
    ),
    "costs beyond all bounds": (
        "--pipeline-schedule v-half --pipeline-costs 1e308,1,1",
        "--pipeline-costs: costs F,I,W must be from 1e-100 to 1e+100",
    ),
    "a file without a name": (
        "--pipeline-schedule file",
        "--pipeline-schedule file: name the CSV itself, such as --pipeline-schedule mine.csv",
    ),
    "a file that is not there": (
        "--pipeline-schedule none.csv",
        "--pipeline-schedule: cannot read none.csv: No such file",
    ),
    "a file without end": (
        "--pipeline-schedule {folder}/endless.csv",
        "endless.csv: it is no regular file",
    ),
    "a file that is no schedule": (
        "--pipeline-schedule {folder}/license.csv",
        "--pipeline-schedule: license.csv: CSV row 2, cell 1",
    ),
    "chunks for another schedule": (
        "--pipeline-schedule v-half:4",
        "--pipeline-schedule v-half:4: v-half has 2 chunks a rank; leave out :4",
    ),
    "a word for chunks": (
        "--pipeline-schedule interleaved-1f1b:two",
        "--pipeline-schedule interleaved-1f1b: 'two' is not a whole number: a rank holds 1 chunk or more",
    ),
    "a configuration in YAML": ("--pipeline-schedule v-half --yaml-cfg none.yaml", "--yaml-cfg"),
    "a file of configuration that is called none": ("--pipeline-schedule v-half --yaml-cfg none", "--yaml-cfg"),
    "data of another make": ("--pipeline-schedule v-half --fim-data", "--fim-data is not supported here"),
    "conversations made up": ("--pipeline-schedule 1f1b --sft", "give --data-path"),
    "packed samples side by side": (
        "--dataloader-inter-document-masking --micro-batch-size 2",
        "give --micro-batch-size 1",
    ),
    "packed samples across ranks": (
        "--dataloader-inter-document-masking --context-parallel-size 2 --pipeline-model-parallel-size 2",
        "leave the flag out",
    ),
    "positions of three dimensions": ("--position-embedding-type mrope --mrope-section 1 1 2", "one: give rope"),
    "multi-token prediction in the middle": (
        "--pipeline-model-parallel-layout Ett|tt|ttttm|L --mtp-num-layers 1",
        "--pipeline-model-parallel-layout 'Ett|tt|ttttm|L': a stage of multi-token prediction in the middle would get "
        "no tokens here; write every m before the L",
    ),
    "auto within too little": ("--pipeline-schedule auto --pipeline-memory-limit 0.001", "--pipeline-memory-limit"),
    "adaptive without a limit": ("--pipeline-schedule adaptive", "--pipeline-memory-limit"),
    "a limit that is none": (
        "--pipeline-schedule adaptive --pipeline-memory-limit half",
        "neither a fraction such as 0.5 nor such as 20GiB",
    ),
    "too little memory": ("--pipeline-schedule adaptive --pipeline-memory-limit 0.1", "0.2856 is the smallest"),
    "too few GiB": (
        "--pipeline-schedule adaptive --pipeline-memory-limit 0.00001GiB",
        "--pipeline-memory-limit 0.00001GiB is too small for this model on 4 ranks: ",
    ),
    "a limit for another schedule": ("--pipeline-schedule v-half --pipeline-memory-limit 0.5", "goes with"),
    "recompute for another schedule": (
        "--pipeline-schedule v-half --pipeline-save-memory recompute",
        "--pipeline-save-memory recompute goes with --pipeline-schedule adaptive or auto, not v-half",
    ),
    "memory saved nobody knows how": (
        "--pipeline-schedule adaptive --pipeline-memory-limit 0.5 --pipeline-save-memory some",
        "--pipeline-save-memory 'some' is unknown: use none, recompute, offload[=GB/s] or both[=GB/s]",
    ),
    "a speed of what copies nothing": (
        "--pipeline-schedule adaptive --pipeline-memory-limit 0.5 --pipeline-save-memory recompute=25",
        "--pipeline-save-memory recompute=25: recompute copies nothing; leave out =25",
    ),
    "everything recomputed, and some of it twice": (
        "--pipeline-schedule adaptive --pipeline-memory-limit 0.5 --pipeline-save-memory recompute "
        "--recompute-granularity full --recompute-method uniform",
        "--pipeline-save-memory recompute does not go with --recompute-granularity full: both recompute whole layers",
    ),
    "copies beside passes of unknown length": (
        "--pipeline-schedule adaptive --pipeline-memory-limit 0.5 --pipeline-save-memory offload=25",
        "--pipeline-save-memory offload=25 compares copies with passes, whose times are not known: give",
    ),
    "copies that nobody measured": (
        "--pipeline-schedule adaptive --pipeline-memory-limit 0.5 --pipeline-save-memory offload --pipeline-costs "
        "3,3,2",
        "--pipeline-save-memory offload takes the time of copies from --pipeline-costs FILE.json",
    ),
    "copies at no speed": (
        "--pipeline-schedule adaptive --pipeline-memory-limit 0.5 --pipeline-save-memory both=fast --pipeline-costs "
        "3,3,2",
        "--pipeline-save-memory both= 'fast' is not a number",
    ),
    "linears it cannot split, before it searches": (
        "--pipeline-schedule adaptive --pipeline-memory-limit 0.5 --transformer-impl transformer_engine",
        "--transformer-impl",
    ),
    "a field of a cost file that is no number": (
        "--pipeline-schedule v-half --pipeline-costs {folder}/words.json",
        "$.messages[1] must be a number",
    ),
    "costs measured before": (
        "--pipeline-schedule v-half --pipeline-costs {folder}/before.json",
        "before.json is no cost file: it is a profile of one chunk (version 1), which is no longer read: measure again",
    ),
    "memory of layers that the model knows": (
        "--pipeline-schedule v-half --pipeline-costs {folder}/held.json",
        "in training the model's sizes say what is held; leave it out",
    ),
    "a cost file that is none": (
        "--pipeline-schedule v-half --pipeline-costs {folder}/license.json",
        "license.json is no cost file: it is no JSON: JSON is malformed: invalid character (byte 34); "
        "--pipeline-measure and tools/profile_passes.py write such files",
    ),
    "a cost file with another ending": (
        "--pipeline-schedule v-half --pipeline-costs LICENSE",
        "not 'LICENSE'; or name a FILE.json",
    ),
    "layers placed by nobody known": (
        "--pipeline-schedule v-half --pipeline-layers best",
        "--pipeline-layers 'best' is not a number: even, auto or the layers of each stage such as 3,4,4,3 is needed",
    ),
    "layers of other stages": (
        "--pipeline-schedule v-half --pipeline-layers 2,2,2,2",
        "has 8 stages and --pipeline-layers 2,2,2,2 has 4: give a number for each, in model order",
    ),
    "layers of another model": (
        "--pipeline-schedule 1f1b --pipeline-layers 2,2,2,3",
        "has 8 layers (--num-layers) and --pipeline-layers 2,2,2,3 has 9: give as many",
    ),
    "layers placed twice": (
        "--pipeline-schedule v-half --pipeline-layers auto --account-for-loss-in-pipeline-split",
        "--pipeline-layers auto places the layers itself: leave out --pipeline-model-parallel-layout",
    ),
    "layers placed without a schedule": (
        "--pipeline-layers auto",
        "--pipeline-layers goes with --pipeline-schedule: name one of auto, 1f1b",
    ),
    "an order that is given, planned again": (
        "--pipeline-schedule x.csv --pipeline-replan",
        "--pipeline-replan with --pipeline-schedule file would change nothing: its order does not depend on costs",
    ),
    "an order that is stated, planned again": (
        "--pipeline-schedule interleaved-1f1b --pipeline-replan",
        "leave the flag out, or use one of zb-1p, zb-2p, 1f1b-v, v-min, v-half, v-zb, adaptive",
    ),
    "planning again without a schedule": (
        "--pipeline-replan",
        "--pipeline-replan goes with --pipeline-schedule: name one of auto, 1f1b",
    ),
    "a limit measured for a schedule that has its own": (
        "--pipeline-schedule v-half --pipeline-memory-limit auto",
        "--pipeline-memory-limit goes with --pipeline-schedule adaptive or auto, not v-half",
    ),
    "a profile of one iteration": (
        "--pipeline-schedule v-half --pipeline-measure out:1-1",
        "--pipeline-measure out:1-1 has no iteration that is timed: the first counts bytes",
    ),
    "a profile of no iterations": (
        "--pipeline-schedule v-half --pipeline-measure out:5",
        "--pipeline-measure 'out:5' ends with '5', which is not two iterations with a dash between, from 1 on: write "
        "it as in out:5-10",
    ),
    "a profile after the end": (
        "--pipeline-schedule v-half --pipeline-measure out:1-2",
        "--pipeline-measure out:1-2 goes on after the job's end: --train-iters is 1; end it by then",
    ),
    "a timeline in a file": (
        "--pipeline-schedule v-half --train-iters 4 --pipeline-measure LICENSE/here",
        "/LICENSE is no folder; name a folder, there or to be made",
    ),
    "a timeline of one iteration": (
        "--pipeline-schedule v-half --pipeline-measure out",
        "--pipeline-measure takes two iterations, and --train-iters is 1: train for more",
    ),
    "a profile without a folder": (
        "--pipeline-schedule v-half --pipeline-measure :2-4",
        "--pipeline-measure ':2-4' names no folder: write it such as out or out:5-10",
    ),
    "a timeline without a schedule": (
        "--pipeline-measure out",
        "--pipeline-measure goes with --pipeline-schedule: name one of auto, 1f1b",
    ),
    "a conversion to a format that does not say where layers are": (
        "--pipeline-schedule v-half --ckpt-convert-format torch",
        "does not work with --ckpt-convert-format: the format torch does not say which layers or words a rank holds; "
        "convert without --pipeline-schedule",
    ),
    "a restart inside the process": ("--pipeline-schedule 1f1b --inprocess-restart", "--inprocess-restart"),
    "checkpoints that could not cross": ("--pipeline-schedule v-half --ckpt-format torch", "--ckpt-format torch"),
    "more layers than a plan can have": (
        "--pipeline-schedule v-half --num-layers 100000000",
        "--num-layers must be 2000 or less, not 100000000",
    ),
    "more layers of multi-token prediction than a plan can have": (
        "--pipeline-schedule v-half --mtp-num-layers 99999999999",
        "--mtp-num-layers must be 100 or less, not 99999999999",
    ),
    "more samples than a plan can have": (
        "--pipeline-schedule v-half --global-batch-size 100000000",
        "--pipeline-model-parallel-size 4 with --global-batch-size 100000000, 100000000 microbatches, is too large",
    ),
    "more samples than a plan can have in a later step": (
        "--pipeline-schedule v-half --step-batch-size-schedule 0:4,1K:100000000",
        "with --step-batch-size-schedule 100000000, 100000000 microbatches, is too large to plan",
    ),
    "more ranks than a plan can have": (
        "--pipeline-schedule v-half --pipeline-model-parallel-size 1000000",
        "--pipeline-model-parallel-size must be 1024 or less, not 1000000",
    ),
    "more chunks than a plan can have": (
        "--pipeline-schedule interleaved-1f1b:99999999999",
        "--pipeline-schedule interleaved-1f1b: 99999999999 is too large: 1000 at most",
    ),
    "more GPUs than there are": (
        "--pipeline-schedule v-half --pipeline-dry-run 99999999999999999999",
        "--pipeline-dry-run 99999999999999999999 is too large: 10000000 at most",
    ),
    "no tensor-parallel rank": (
        "--pipeline-schedule v-half --tensor-model-parallel-size 0",
        "--tensor-model-parallel-size must be 1 or more, not 0",
    ),
    "no context-parallel rank in a dry run": (
        "--pipeline-schedule v-half --pipeline-dry-run --context-parallel-size 0",
        "--context-parallel-size must be 1 or more, not 0",
    ),
    "no samples in a microbatch": (
        "--pipeline-schedule v-half --micro-batch-size 0",
        "--micro-batch-size must be 1 or more, not 0",
    ),
    "a size of 20 digits": (
        "--pipeline-schedule v-half --hidden-size 99999999999999999999",
        "--hidden-size must be 10000000 or less, not 99999999999999999999",
    ),
    "a size in raised digits": (
        "--pipeline-schedule v-half --num-layers ²",
        "--num-layers must be a whole number from 1 to 2000, not '²'",
    ),
    "our numbers in digits of another script": (
        "--pipeline-schedule interleaved-1f1b:٣",
        "--pipeline-schedule interleaved-1f1b: '٣' is not a whole number",
    ),
    "a memory limit in digits of another script": (
        "--pipeline-schedule adaptive --pipeline-memory-limit ٣",
        "--pipeline-memory-limit '٣' is neither a fraction such as 0.5 nor such as 20GiB",
    ),
    "layers with experts without end": (
        "--pipeline-schedule v-half --moe-layer-freq [0]*9**9**9",
        "--moe-layer-freq: '[0]*9**9**9' is not a whole number, or a list of zeros and ones such as [0]*1+[1]*31",
    ),
    "layers with experts that break off": (
        "--pipeline-schedule v-half --moe-layer-freq [0]*8+",
        "--moe-layer-freq: '[0]*8+' is not a whole number, or a list of zeros and ones",
    ),
    "layers with windows without end": (
        "--pipeline-schedule v-half --window-attn-skip-freq [0]*9**9**9",
        "--window-attn-skip-freq: '[0]*9**9**9' is not a whole number",
    ),
    "a limit measured on a CPU": (
        "--pipeline-schedule adaptive --pipeline-memory-limit auto",
        "--pipeline-memory-limit: auto measures what GPUs have left, and this job runs on the CPU: give a fraction",
    ),
    "a schedule in a file with too long a name": (
        f"--pipeline-schedule {'x' * 300}.csv",
        "--pipeline-schedule: cannot read xxxx",
    ),
    "a timeline under too long a name": (
        f"--pipeline-schedule v-half --train-iters 4 --pipeline-measure {'x' * 300}",
        "File name too long; give another name",
    ),
    "one chunk interleaved": ("--pipeline-schedule interleaved-1f1b:1", "at least 2 chunks"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files that are named above."""
    made = tmp_path_factory.mktemp("refused")
    texts = {
        "words.json": '{"version": 3, "messages": [1, "b"]}',
        "before.json": '{"version": 1}',
        "held.json": '{"version": 3, "weight_share": 0.5}',
    } | dict.fromkeys(("license.json", "license.csv"), (ROOT / "LICENSE").read_text())
    for name, text in texts.items():
        (made / name).write_text(text)
    (made / "endless.csv").symlink_to("/dev/zero")
    return made


def words(what: str, folder: Path) -> list[str]:
    """The flags of a case."""
    return REFUSED[what][0].replace("{folder}", str(folder)).split()


def assert_refused(outputs: list[tuple[int, str]], part: str) -> None:
    assert [code for code, _ in outputs] == [2] * len(outputs)
    lines = [line for _, text in outputs for line in text.splitlines() if line.strip()]
    assert len(lines) == 1, lines
    assert lines[0].startswith("pretrain_gpt.py: error: "), lines
    assert part in lines[0]


# Only a device says what it has left, and Megatron's import brings what asks it.
NEED_MEGATRON = {"a limit measured on a CPU"}
# Refused in jobs of four ranks by day.
BY_DAY = {
    "a schedule in capitals",
    "a misspelt flag",
    "a schedule in a file with too long a name",
    "a shared vocabulary and scaled logits",
    "a shared vocabulary that cannot be cut",
    *NEED_MEGATRON,
}
# Of these docs/compatibility.md tells: Megatron has them, and ours refuses them.
KNOWN = (
    "Megatron's own CUDA graphs of layers",
    "a limit to experts' tokens in iterations that are measured",
    "a limit to experts' tokens and several plans",
    "a limit to experts' tokens in an iteration that is verified",
    "a CUDA graph of iterations that recompute",
    "a CUDA graph of iterations that are measured",
    "a CUDA graph of iterations with several plans",
    "a CUDA graph of an iteration that is verified",
    "a CUDA graph of iterations of any shape",
    "a CUDA graph of iterations in fp16",
    "a CUDA graph of the first iteration",
    "a CUDA graph of iterations with experts of any size",
    "CUDA graphs and several plans",
    "CUDA graphs and plans for lengths",
    "CUDA graphs and a growing batch",
    "CUDA graphs that are not verified",
    "CUDA graphs and memory saving",
    "CUDA graphs of packed samples",
    "FSDP",
    "activation offloading",
    "checkpoints that could not cross",
    "data of another make",
    "experts' messages behind computing",
    "a configuration in YAML",
    "linears it cannot split",
    "a shared vocabulary and multi-token prediction",
    "a shared vocabulary and scaled logits",
    "a shared vocabulary in packed samples",
    "a shared vocabulary in the old format",
    "packed samples across ranks",
    "packed samples side by side",
)


def noted(what: str) -> ParameterSet:
    flags = REFUSED[what][0].split()
    schedule = flags[flags.index("--pipeline-schedule") + 1] if "--pipeline-schedule" in flags else "any"
    return pytest.param(what, marks=[pytest.mark.feature(what, schedule)] * (what in KNOWN))


@pytest.mark.parametrize("what", list(map(noted, sorted(REFUSED.keys() - NEED_MEGATRON, key=list(REFUSED).index))))
def test_refused(record_property, told_early, what):
    """Before torch and Megatron are imported, so on every rank alike."""
    assert_refused([(2, told_early[what])], REFUSED[what][1])
    record_property("refusal", told_early[what].strip().removeprefix("pretrain_gpt.py: error: "))


def in_jobs() -> list[ParameterSet]:
    """One case of each kind by day: a name, a flag, a file, a rule, the environment's; all at night."""
    return some_by_night(REFUSED, lambda what: what not in BY_DAY)


@pytest.mark.job
@pytest.mark.parametrize("what", in_jobs())
def test_one_rank_of_a_job_says_why_it_is_refused(megatron, told_early, folder, what):
    outputs = megatron("outputs", 4, [*JOB, *PP4, *words(what, folder)])
    assert_refused(outputs, REFUSED[what][1])
    assert told_early[what] == ("" if what in NEED_MEGATRON else outputs[0][1])


# --- before anything heavy is imported ----------------------------------------------------------------------------

EARLY = """
import contextlib, io, json, os, sys
sys.path.insert(0, os.getcwd())
from megatron.schedules.integration.flags.checks import refuse_early
from megatron.schedules.integration.gpt_data import refuse_other_data
os.environ |= {"RANK": "0", "WORLD_SIZE": "4"}
said = {}
for what, flags in json.load(sys.stdin).items():
    sys.argv = ["pretrain_gpt.py", *flags]
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.suppress(SystemExit):
        refuse_early(flags)
        refuse_other_data(flags)
    said[what] = errors.getvalue()
assert not {"torch", "numpy", "megatron.core"} & set(sys.modules)
json.dump(said, sys.stdout)
"""


@pytest.fixture(scope="module")
def told_early(folder: Path) -> dict[str, str]:
    """What is said of every request where nothing but Python's own library, and ours, is imported."""
    asked = {what: [*JOB, *PP4, *words(what, folder)] for what in REFUSED}
    done = subprocess.run(
        [sys.executable, "-c", EARLY], cwd=ROOT, input=json.dumps(asked), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def test_a_wrong_flag_is_refused_in_a_moment():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "pretrain_gpt.py", *JOB, "--pipeline-schedule", "v-haff"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 2
    assert (
        done.stderr == "pretrain_gpt.py: error: --pipeline-schedule: unknown schedule 'v-haff': did you mean v-half?\n"
    )
    # Processor time: a busy machine makes the wall clock say anything.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1


@pytest.mark.job
def test_none_of_megatrons_flags_is_taken_for_a_misspelt_one_of_ours(megatron):
    ours = ("--pipeline-schedule", *OURS)
    assert not [flag for flag in megatron("stock_flags") if difflib.get_close_matches(flag, ours, cutoff=LIKE)]


@pytest.mark.job
def test_megatrons_flags_are_read_early_as_megatron_reads_them(megatron):
    parser = argparse.ArgumentParser(add_help=False)
    megatron_flags.declare(parser, STOCK, megatron_flags.NAMED_OTHERWISE)
    assert {flag: how for flag, how in megatron("stock_flags").items() if flag in STOCK} == flags_of(parser)


@pytest.mark.parametrize(
    "flags", ["--num-layers ²", "--num-layers 99999999999", "--moe-layer-freq [0]*9**9**9", "--micro-batch-size 0"]
)
def test_without_a_schedule_megatrons_flags_are_megatrons_to_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: str
):
    monkeypatch.setenv("WORLD_SIZE", "²")
    refuse_early([*JOB, *PP4, *flags.split()])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("fault", ["missing", "doubled"])
def test_a_file_with_a_pass_missing_or_doubled(megatron, tmp_path, fault):
    text = to_csv(plan(Request("v-half", 4, 4)))
    path = tmp_path / "schedule.csv"
    path.write_text(text.replace(",3F2,", ",") if fault == "missing" else text.replace(",3F2,", ",3F2,3F2,"))
    flags = ["--pipeline-schedule", str(path)]
    part = "3F2 is missing" if fault == "missing" else "3F2 stands 2 times"
    assert_refused(megatron("outputs", 4, [*JOB, *PP4, *flags]), part)


@pytest.mark.parametrize(
    ("variable", "text", "said"),
    [
        (STALL_VARIABLE, "-1", "-1 is below zero: a number of seconds, or 0 for no limit, is needed"),
        (STALL_VARIABLE, "nan", "'nan' is not a number: a number of seconds, or 0"),
        (STALL_VARIABLE, "never", "'never' is not a number"),
        (SEARCH_VARIABLE, "0", "0 is not above zero: a positive number of seconds is needed"),
        (SEARCH_VARIABLE, "1e308", ": a search may take 1,000,000 seconds"),
    ],
)
def test_an_environment_that_is_no_number_of_seconds_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], variable: str, text: str, said: str
):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv(variable, text)
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py"])
    adaptive = ["--pipeline-schedule", "adaptive", "--pipeline-memory-limit", "0.5"]
    with pytest.raises(SystemExit):
        refuse_early([*JOB, *PP4, *adaptive])
    line = capsys.readouterr().err
    assert line.startswith(f"pretrain_gpt.py: error: ${variable}") and said in line
    refuse_early([*JOB, *PP4])  # is none of Megatron's business
    assert capsys.readouterr().err == ""


@pytest.mark.job
def test_a_good_file_trains_as_the_schedule_it_holds(train, tmp_path):
    path = tmp_path / "schedule.csv"
    path.write_text(to_csv(plan(Request("v-half", 2, 4))))
    job = ("--train-iters", "2", "--global-batch-size", "4", "--pipeline-model-parallel-size", "2")
    named = train(2, *job, "--pipeline-schedule", "v-half")
    ours = train(2, *job, "--pipeline-schedule", str(path))
    assert ours.losses == named.losses


@pytest.mark.job
def test_help_says_what_our_flags_are_for(megatron):
    ((code, text),) = megatron("outputs", 1, ["--help"])
    assert code == 0
    for flag in ("schedule", *(each.removeprefix("--pipeline-") for each in OURS)):
        assert re.search(rf"--pipeline-{flag}\s", text)
    assert len(OURS) == 10
    assert "v-half: half of" in text
