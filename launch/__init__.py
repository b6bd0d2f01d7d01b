"""How processes start: the `kimi-pretrain` command, torchrun, SLURM and the demo."""
