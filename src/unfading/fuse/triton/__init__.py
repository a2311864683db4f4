"""From a program to Triton kernels on a GPU."""
