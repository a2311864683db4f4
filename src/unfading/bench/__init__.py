"""What the cells cost: each beside the reference loop, torch.nn's nearest and its own matrix products, in one process.

cases -> measure (agreement, then timing) -> rows -> table, figure, JSON lines
"""
