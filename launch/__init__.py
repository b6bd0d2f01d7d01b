"""Process launch: the `kimi-pretrain` command, torchrun, SLURM and the demo."""
