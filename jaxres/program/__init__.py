"""A program in place of the trainer: the worker that starts, watches and stops its command."""
