"""The command line in processes of its own.

Each would take two seconds to import torch. So one server imports it, once for all tests of this process, and forks for every
command: a command finds the library as it is on disk, and nothing of what a test has changed in this process.
"""

import atexit
import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

SERVER = """if True:
    import json, os, sys
    import torch, torch._dynamo, tyro, unfading.catalogue, unfading.cli.main  # a first trace imports torch._dynamo

    for line in sys.stdin:
        arguments, environment, folder, files = json.loads(line)
        child = os.fork()
        if not child:
            os.environ.clear()
            os.environ.update(environment)
            os.chdir(folder)
            for number, (path, mode) in enumerate(zip(files, (os.O_RDONLY, os.O_WRONLY, os.O_WRONLY))):
                os.dup2(os.open(path, mode), number)
            sys.argv = ["unfading", *arguments]
            unfading.cli.main.main()
            sys.exit()
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@cache
def _server():
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def end():
        server.communicate()

    atexit.register(end)
    return server


def run(*arguments):
    """What `unfading` with these arguments prints, and its exit code."""
    server = _server()
    with tempfile.TemporaryDirectory() as folder:
        out, err = (Path(folder, name) for name in ("out", "err"))
        out.touch()
        err.touch()
        environment = {**os.environ, "COLUMNS": "80"}
        request = [arguments, environment, os.getcwd(), [os.devnull, str(out), str(err)]]
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        code = int(server.stdout.readline())
        return subprocess.CompletedProcess(arguments, code, out.read_text(), err.read_text())
