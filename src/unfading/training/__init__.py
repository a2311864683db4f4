"""Training: runs, the training loop, checkpoints, records and comparison of many runs."""
