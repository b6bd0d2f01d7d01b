"""The `kimi-pretrain` command: one file for each group of commands, and what they show."""
