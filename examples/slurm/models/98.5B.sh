# shellcheck shell=bash disable=SC2034  # job.sh uses what is set here
# 98.5B parameters. 78 layers + 2 = 2 x 40: the embedding and the output layer stand in for a layer each, so that a
# V has one layer a stage, and 1F1B two.
GPUS=40 # for one copy of the model
MODEL_FLAGS=(--num-layers 78 --hidden-size 10240 --num-attention-heads 80)
PARALLEL_FLAGS=(
  --pipeline-model-parallel-size 40
  --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split
)
GLOBAL_BATCH_SIZE=${GLOBAL_BATCH_SIZE:-160}
