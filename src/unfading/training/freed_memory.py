"""Keep the memory of a training step for the next one, on a CPU with the GNU C library.

By default that library returns a large block to the system when its tensor is freed. When the next step asks for it again, the
system clears every page first, which takes a tenth to a quarter of the time of a training step.
"""

import ctypes
import os

from unfading.allocation import available

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
SHARE, MOST = 0.25, 2**31 - 1  # of the available memory, and bytes; mallopt takes an int


def keep_freed_memory() -> None:
    """From now on keep up to 2 GiB of freed memory in this process, and at most a quarter of what is available.

    This holds for the whole process, so it is for programs and not for the import of a library. Settings of the user's
    environment are left as they are.
    """
    if any(name in os.environ for name in SETTINGS):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library
        return
    keep = int(min(SHARE * available(), MOST))
    mallopt(M_MMAP_THRESHOLD, keep)
    mallopt(M_TRIM_THRESHOLD, keep)
