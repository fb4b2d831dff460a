"""Reports of a run: console, TensorBoard, heartbeat to the supervisor, webhook alerts."""
