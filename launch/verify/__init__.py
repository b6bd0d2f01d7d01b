"""The jobs that `kimi-pretrain verify` starts, what their processes run, and what it prints."""
