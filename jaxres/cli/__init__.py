"""Commands on runs and checkpoints: status, history, checkpoints, doctor, replay."""
