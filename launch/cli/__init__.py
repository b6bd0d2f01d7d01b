"""The `kimi-pretrain` command, with one file per group of commands and their terminal output."""
