"""Datasets: the table of what is known of each, and the folder they are stored in."""
