"""What a run reports: console, TensorBoard, heartbeat to the supervisor, alerts."""
