"""Cells of the catalogue on tasks that need long memory, at equal numbers of parameters."""
