"""Tasks own data, loss and metrics, and say what reads the recurrent output; they never know a model."""
