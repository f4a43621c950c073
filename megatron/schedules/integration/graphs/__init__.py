"""CUDA graphs of layers (``--cuda-graph-impl transformer_engine``) in the order of a plan."""
