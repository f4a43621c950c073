# shellcheck shell=bash disable=SC2034  # job.sh uses what is set here
# 3.2B parameters. 14 layers + 2 = 2 x 8: the embedding and the output layer stand in for a layer each, so that a V
# has one layer a stage, and 1F1B two.
GPUS=8 # for one copy of the model
MODEL_FLAGS=(--num-layers 14 --hidden-size 4096 --num-attention-heads 32)
PARALLEL_FLAGS=(
  --pipeline-model-parallel-size 8
  --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split
)
GLOBAL_BATCH_SIZE=${GLOBAL_BATCH_SIZE:-32}
