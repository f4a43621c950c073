# shellcheck shell=bash disable=SC2034  # job.sh uses what is set here
# 9.6B parameters. 30 layers + 2 = 2 x 16: the embedding and the output layer stand in for a layer each, so that a V
# has one layer a stage, and 1F1B two.
GPUS=16 # for one copy of the model
MODEL_FLAGS=(--num-layers 30 --hidden-size 5120 --num-attention-heads 40)
PARALLEL_FLAGS=(
  --pipeline-model-parallel-size 16
  --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split
)
GLOBAL_BATCH_SIZE=${GLOBAL_BATCH_SIZE:-64}
