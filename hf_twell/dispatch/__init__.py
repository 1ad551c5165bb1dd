"""Which way a call goes, decided in one place: by plain PyTorch, by matmuls and one kernel between, or by kernels.

Blocks, compiled graphs, `hf_twell.ops.ffn`, the C++ operators and the vLLM plugin all ask here, or read the same table.
`key` says what a call is, `activity` and `training` what is known of a block's activity, `limits` reads the numbers, of
which none stands here, and `choose` decides.
"""
