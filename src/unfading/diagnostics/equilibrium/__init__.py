"""Analysis of incremental cells: equilibria, convergence and inner steps."""
