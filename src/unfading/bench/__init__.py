"""How fast the cells are: each beside the reference loop, torch.nn's equivalent and other kernels, in one process.

CPU    cases     -> cpu (check agreement, then time)                           -> results -> tables, figure, JSON lines
GPU    gpu_cases -> gpu (the same, beside peers, in the precision of the case) -> results -> tables, JSON lines
"""
