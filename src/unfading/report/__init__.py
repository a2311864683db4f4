"""What came of runs, from their records alone: a table, figures, one page. Nothing here imports torch."""
