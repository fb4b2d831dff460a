"""The commands that look at a run or work on its checkpoints: status, history, checkpoints, doctor, replay."""
