"""Sweeps and queues of runs that any number of workers share through an Optuna storage."""
