"""Paths that tests share."""

import os
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
QUICK_CC = ROOT / "tests" / "helpers" / "quick_cc"
# Real datasets, if any. Read before a test changes the variable.
REAL_DATA = os.environ.get("UNFADING_DATA")
