"""The recurrence compiler: a cell's `step` becomes a small program, its reverse, and one loop over time in C."""
