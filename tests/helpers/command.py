"""The command line, in this process: a process of its own takes two seconds to import torch.

A test that needs the library as it is on disk, without what a fixture has changed here, calls `run_apart`.
"""

import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from unittest import mock

from tests.helpers.paths import ROOT
from unfading.cli.main import main


def run(*arguments):
    """What `unfading` with these arguments prints, and its exit code."""
    code = 0
    with (
        mock.patch.object(sys, "argv", ["unfading", *arguments]),
        mock.patch.dict(os.environ, COLUMNS="80"),
        redirect_stdout(io.StringIO()) as out,
        redirect_stderr(io.StringIO()) as err,
    ):
        try:
            main()
        except SystemExit as ended:
            code = ended.code or 0
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


APART = """if True:
    import json, sys
    from tests.helpers.command import run

    answers = [run(*arguments) for arguments in json.loads(sys.argv[1])]
    print(json.dumps([(answer.args, answer.returncode, answer.stdout, answer.stderr) for answer in answers]))
"""


def run_apart(*commands):
    """The same for each of some lists of arguments, one after the other in one process of their own."""
    program = [sys.executable, "-c", APART, json.dumps(commands)]
    answer = subprocess.run(program, capture_output=True, text=True, check=True, cwd=ROOT)
    return [subprocess.CompletedProcess(*each) for each in json.loads(answer.stdout)]
