"""The recurrence compiler: a cell's `step` becomes a program, its reverse, and one loop over time in C or Triton."""
