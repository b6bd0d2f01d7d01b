"""Launches the jobs of `kimi-pretrain verify` and prints results; `kimi_pretrain.verify` compares.

`verification` holds the common frame, `dep` and `resume` the two kinds, `jobs` starts processes,
`worker` runs in each of these processes, and `terminal` prints.
"""
