"""The command line in a process of its own."""

import os
import subprocess
import sys


def run(*arguments):
    environment = {**os.environ, "COLUMNS": "80"}
    command = [sys.executable, "-c", "from unfading.cli.main import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment)
