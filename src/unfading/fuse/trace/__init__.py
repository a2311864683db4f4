"""From a cell's `step` and `project` to a program."""
