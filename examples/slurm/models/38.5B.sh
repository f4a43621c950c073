# shellcheck shell=bash disable=SC2034  # job.sh uses what is set here
# 38.5B parameters. 62 layers + 2 = 2 x 32: the embedding and the output layer stand in for a layer each, so that a
# V has one layer a stage, and 1F1B two.
GPUS=32 # for one copy of the model
MODEL_FLAGS=(--num-layers 62 --hidden-size 7168 --num-attention-heads 56)
PARALLEL_FLAGS=(
  --pipeline-model-parallel-size 32
  --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split
)
GLOBAL_BATCH_SIZE=${GLOBAL_BATCH_SIZE:-128}
