"""What the cells cost: each beside the reference loop, torch.nn's nearest and other people's kernels, in one process.

CPU    cases     -> measure (agreement, then timing)                -> rows -> table, figure, JSON lines
GPU    gpu_cases -> gpu (the same, beside peers, in a precision)    -> rows -> table, JSON lines
"""
