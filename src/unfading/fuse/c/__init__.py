"""From a program to a compiled C loop on the CPU."""
