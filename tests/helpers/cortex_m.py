"""The mark of tests that run on an emulated Cortex-M4."""

import pytest

from unfading.export.cortex_m import GCC, QEMU, missing

MISSING = missing(GCC, QEMU)
needs_cortex_m = pytest.mark.skipif(bool(MISSING), reason=f"needs {' and '.join(MISSING)}")
