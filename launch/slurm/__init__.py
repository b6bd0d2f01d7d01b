"""Jobs under SLURM: the batch script, submitting it, following it."""
