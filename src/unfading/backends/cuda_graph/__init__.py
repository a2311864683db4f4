"""The reference loop as CUDA graphs."""
