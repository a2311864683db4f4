"""Files that are either complete or absent, JSON with checksums and limits, and the schema of the JSON that is read."""

from unfading.files.atomic import write_atomically
from unfading.files.checked_json import read_json, write_json

__all__ = ["read_json", "write_atomically", "write_json"]
