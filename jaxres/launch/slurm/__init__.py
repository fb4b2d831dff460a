"""`launch slurm`: a job that Slurm starts again."""
