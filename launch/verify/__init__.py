"""What `kimi-pretrain verify` starts and prints; `kimi_pretrain.verify` compares.

`verification` is the frame of both, `dep` and `resume` are what differs between them, `jobs` starts
processes, `worker` is one of those, `terminal` prints.
"""
