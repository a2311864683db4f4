"""Reports from the records of runs: tables, figures and HTML pages. Nothing here imports torch."""
