"""Checkpoints: saved asynchronously, committed by a record in the run log and by nothing else."""
