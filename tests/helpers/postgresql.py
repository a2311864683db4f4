"""A PostgreSQL server of its own for a test: in a temporary folder, reached through a socket there."""

import getpass
import os
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

OPTIONS = ("-c", "listen_addresses=", "-c", "fsync=off", "-c", "full_page_writes=off")


def program(name):
    """A program of the server. Debian does not put them on the path. Skips where it is absent."""
    places = [shutil.which(name), *sorted(map(str, Path("/usr/lib/postgresql").glob(f"*/bin/{name}")), reverse=True)]
    path = next(filter(None, places), None)
    if path is None:
        pytest.skip(f"PostgreSQL is not installed: there is no {name} (apt-get install postgresql)")
    return path


@contextmanager
def server():
    """The address of a running server."""
    initdb, postgres = program("initdb"), program("postgres")
    # The server refuses to run as root.
    user = "postgres" if os.getuid() == 0 else None
    folder = Path(tempfile.mkdtemp(prefix="unfading-"))
    try:
        if user is not None:
            shutil.chown(folder, user)
        data = folder / "data"
        command = [initdb, "-D", data, "-U", "tester", "--auth", "trust", "--no-sync"]
        subprocess.run(command, user=user, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        with open(folder / "log", "w") as log:
            process = subprocess.Popen(
                [postgres, "-D", data, "-k", folder, *OPTIONS], user=user, cwd=folder, stdout=log, stderr=log
            )
        try:
            _wait(folder, process)
            yield f"postgresql://tester@/postgres?host={folder}"
        finally:
            process.send_signal(signal.SIGINT)  # does not wait for connections
            process.wait()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _wait(folder, process):
    command = [program("pg_isready"), "-h", folder, "-U", "tester", "-q"]
    for _ in range(300):
        if subprocess.run(command, check=False).returncode == 0:
            return
        assert process.poll() is None, (folder / "log").read_text()
        time.sleep(0.1)
    raise AssertionError(f"the server did not start for {getpass.getuser()}: {(folder / 'log').read_text()}")
