"""Training: the command (`__main__`), the worker process, the components, the training loop."""
