"""Jobs under SLURM: the batch script, submission, and following a job's log."""
