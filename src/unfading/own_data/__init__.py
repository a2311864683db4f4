"""Tasks over a user's own data: arrays in memory, and files."""
