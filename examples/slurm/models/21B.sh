# shellcheck shell=bash disable=SC2034  # job.sh uses what is set here
# 21B parameters. 46 layers + 2 = 2 x 24: the embedding and the output layer stand in for a layer each, so that a V
# has one layer a stage, and 1F1B two.
GPUS=24 # for one copy of the model
MODEL_FLAGS=(--num-layers 46 --hidden-size 6144 --num-attention-heads 48)
PARALLEL_FLAGS=(
  --pipeline-model-parallel-size 24
  --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split
)
GLOBAL_BATCH_SIZE=${GLOBAL_BATCH_SIZE:-96}
