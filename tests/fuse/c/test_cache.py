"""The cache of compiled libraries: each is compiled once and checked before it is loaded.

Most tests are about files that one process leaves for another, so they start new processes. These load the two modules
without the package, since importing torch would take seconds.
"""

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from unfading.fuse.c import cache, compiler

PACKAGE = Path(cache.__file__).parent.parent.parent

SOURCE = "int answer(void) { return 42; }"

PRELUDE = f"""
import os, sys, types
package = types.ModuleType("unfading")
package.__path__ = [{str(PACKAGE)!r}]
sys.modules["unfading"] = package
from unfading.fuse.c import cache, compiler
SOURCE = {SOURCE!r}
"""

ASK = "print(cache.library(SOURCE).answer())"

GCC = shutil.which("gcc") or shutil.which("cc")
pytestmark = pytest.mark.skipif(GCC is None, reason="no C compiler on PATH")


class World:
    """An empty cache, and a compiler that logs how it is called."""

    def __init__(self, path, monkeypatch):
        self.path, self.monkeypatch = path, monkeypatch
        self.folder, self.log, self.temporary = path / "cache", path / "log", path / "temporary"
        self.temporary.mkdir()
        for name, value in {"UNFADING_CACHE": self.folder, "TMPDIR": self.temporary, "HOME": path / "home"}.items():
            monkeypatch.setenv(name, str(value))
        # This process may have read TMPDIR before.
        monkeypatch.setattr("tempfile.tempdir", str(self.temporary))
        self.set_compiler(f'exec {GCC} "$@"')

    def set_compiler(self, does, name="compiler"):
        """Make $CC a script that logs the call and then runs these lines."""
        script = self.path / name
        script.write_text(f'#!/bin/sh\necho "$@" >> {self.log}\n{does}\n')
        script.chmod(0o755)
        self.monkeypatch.setenv("CC", str(script))
        return script

    def start(self, code=ASK, *, under=()):
        command = [*under, sys.executable, "-I", "-S", "-c", PRELUDE + code]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, text=True, start_new_session=True, **pipes)

    def ask(self, code=ASK, *, under=()):
        process = self.start(code, under=under)
        output, complaint = process.communicate(timeout=30)
        assert process.returncode == 0, complaint
        return output.strip()

    def refusal(self, source=SOURCE):
        """The message with which a new process refuses to compile."""
        return self.ask(f"try: cache.library({source!r})\nexcept cache.NoCompiler as error: print(error)")

    def calls(self):
        return self.log.read_text().splitlines() if self.log.exists() else []

    def compilations(self):
        return sum("-shared" in call for call in self.calls())

    def libraries(self):
        return sorted(self.folder.glob("*.so"))


@pytest.fixture
def world(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "_loaded", {})
    monkeypatch.setattr(cache, "_refused", {})
    return World(tmp_path, monkeypatch)


@pytest.fixture(scope="session")
def namespace(tmp_path_factory):
    """The command that gives a process its own mount table, so that its mounts end with it."""
    command = ["unshare", "--map-root-user", "--mount"]
    mount = f"mount -t tmpfs none {tmp_path_factory.mktemp('mount')} && exec {sys.executable} -I -S -c ''"
    if shutil.which("unshare") is None or subprocess.run([*command, "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("this system lets no process have mounts of its own")
    return command


def test_compiled_once_then_found_without_running_the_compiler(world):
    assert world.ask() == "42"
    assert world.compilations() == 1
    calls = world.calls()
    nothing_may_run = "import subprocess\ndel subprocess.run, subprocess.Popen\n"
    assert world.ask(nothing_may_run + ASK) == "42"
    assert world.calls() == calls


def test_within_a_process_the_same_object_comes_back(world):
    first = cache.library(SOURCE)
    shutil.rmtree(world.folder)
    assert cache.library("".join(SOURCE)) is first
    assert world.compilations() == 1


def test_the_source_lies_beside_the_library(world):
    cache.library(SOURCE)
    (library,) = world.libraries()
    assert (world.folder / f"{library.name[:32]}.c").read_text() == SOURCE


def test_nothing_but_source_and_library_is_left_behind(world):
    cache.library(SOURCE)
    assert sorted(path.suffix for path in world.folder.iterdir()) == [".c", ".so"]
    assert not list(world.temporary.iterdir())


@pytest.mark.parametrize("what", ["source", "flags", "compiler", "touched compiler", "arguments", "processor"])
def test_the_entry_changes_with(world, what):
    cache.library(SOURCE)
    cache._loaded.clear()
    source = SOURCE
    if what == "source":
        source = SOURCE.replace("42", "43")
    elif what == "flags":
        world.monkeypatch.setattr(compiler, "FLAGS", (*compiler.FLAGS, "-fno-common"))
    elif what == "compiler":
        world.set_compiler(f'exec {GCC} "$@"', name="another")
    elif what == "touched compiler":
        os.utime(os.environ["CC"], (1, 1))
    elif what == "arguments":
        world.monkeypatch.setenv("CC", os.environ["CC"] + " -DMORE")
    else:
        world.monkeypatch.setattr(compiler, "cpu", lambda: "another processor")
    cache.library(source)
    assert world.compilations() == len(world.libraries()) == 2


def test_a_link_to_the_compiler_changes_with_what_it_leads_to(world):
    link = world.path / "link"
    for name in ("one", "two"):
        link.unlink(missing_ok=True)
        target = world.set_compiler(f'exec {GCC} "$@"', name=name)
        # In reproducible images every file has the same modification time.
        os.utime(target, (1, 1))
        link.symlink_to(target)
        world.monkeypatch.setenv("CC", str(link))
        cache.library(SOURCE)
        cache._loaded.clear()
    assert len(world.libraries()) == 2


def test_the_processor_is_told_the_same_at_every_moment(world):
    answers = {world.ask("print(repr(compiler.cpu()))") for _ in range(2)}
    assert len(answers) == 1
    assert "MHz" not in answers.pop()
    if sys.platform == "linux" and os.uname().machine == "x86_64":
        assert "flags" in compiler.cpu()
        assert "model name" in compiler.cpu()


DAMAGE = {
    "empty": lambda content: b"",
    "truncated": lambda content: content[:5000],
    "garbage": lambda content: os.urandom(len(content)),
    "one bit": lambda content: content[:4100] + bytes([content[4100] ^ 1]) + content[4101:],
    "longer": lambda content: content + b"\0",
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_entry_is_made_again(world, damage):
    world.ask()
    (library,) = world.libraries()
    sound = library.read_bytes()
    library.write_bytes(damage(sound))
    assert world.ask() == "42"
    assert world.compilations() == 2
    assert [path.read_bytes() for path in world.libraries()] == [sound]
    assert world.ask() == "42"
    assert world.compilations() == 2


def test_a_sound_library_under_another_key_is_not_taken(world):
    world.ask()
    (right,) = world.libraries()
    world.ask(f"cache.library({SOURCE.replace('42', '666')!r})")
    (wrong,) = set(world.libraries()) - {right}
    right.unlink()
    wrong.rename(world.folder / (right.name[:32] + wrong.name[32:]))
    assert world.ask() == "42"


def test_an_entry_that_is_sound_and_does_not_load_is_made_again(world):
    world.ask()
    (library,) = world.libraries()
    key = library.name[:32]
    library.unlink()
    # As from a machine of another kind that shares its home folder with this one.
    foreign = b"\x7fELF of another machine"
    (world.folder / cache._name(key, foreign)).write_bytes(foreign)
    assert world.ask() == "42"
    assert world.libraries() == [library]


def test_an_entry_of_another_user_is_not_loaded(world):
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    world.ask()
    os.chown(world.libraries()[0], 12345, -1)
    assert world.ask() == "42"
    assert world.compilations() == 2
    assert world.libraries()[0].stat().st_uid == 0


def test_an_entry_that_is_a_link_is_not_followed(world):
    world.ask()
    (library,) = world.libraries()
    library.rename(world.path / "elsewhere.so")
    library.symlink_to(world.path / "elsewhere.so")
    assert world.ask() == "42"
    assert world.compilations() == 2


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770], ids=oct)
def test_a_folder_that_others_may_write_is_neither_read_nor_written(world, mode):
    world.ask()
    world.folder.chmod(mode)
    before = {path: path.stat().st_mtime_ns for path in world.folder.iterdir()}
    assert world.ask() == "42"
    assert world.compilations() == 2
    assert {path: path.stat().st_mtime_ns for path in world.folder.iterdir()} == before


def test_a_folder_of_another_user_is_not_read(world):
    cache.library(SOURCE)
    cache._loaded.clear()
    world.monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert cache.library(SOURCE).answer() == 42
    assert world.compilations() == 2


def test_the_folder_is_private(world):
    before = os.umask(0)
    try:
        cache.library(SOURCE)
    finally:
        os.umask(before)
    assert world.folder.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o077 == 0 for path in world.folder.iterdir())


def test_eight_processes_at_once_on_a_cold_cache(world):
    processes = [world.start() for _ in range(8)]
    assert [process.communicate(timeout=30) for process in processes] == [("42\n", "")] * 8
    assert world.ask("del compiler.build\n" + ASK) == "42"


def test_eight_threads_at_once_compile_once(world):
    answers = []
    threads = [threading.Thread(target=lambda: answers.append(cache.library(SOURCE))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 8
    assert len(set(map(id, answers))) == 1
    assert world.compilations() == 1


def test_a_fork_after_loading_has_the_library(world):
    code = """
library = cache.library(SOURCE)
child = os.fork()
if child == 0:
    os._exit(library.answer() + cache.library(SOURCE).answer() + cache.library(SOURCE.replace("42", "16")).answer())
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), library.answer())
"""
    assert world.ask(code) == "100 42"


def test_a_fork_while_another_thread_compiles(world):
    """The child does not wait for a lock that nobody holds, and does not remove the parent's files at exit."""
    world.set_compiler(f'case "$*" in *-shared*) touch {world.path}/compiling; sleep 0.6;; esac; exec {GCC} "$@"')
    code = f"""
import signal, threading, time
thread = threading.Thread(target=lambda: print(cache.library(SOURCE).answer()))
thread.start()
while not os.path.exists({str(world.path / "compiling")!r}):
    time.sleep(0.01)
if os.fork() == 0:
    signal.alarm(10)
    os.environ["CC"] = {GCC!r}
    print(cache.library(SOURCE).answer() + 1)
    sys.exit()
assert os.wait()[1] == 0
thread.join()
"""
    assert world.ask(code).split() == ["43", "42"]


MOUNTS = {"read-only": "ro", "full at the library": "size=8k", "full at the source": "nr_inodes=1"}


@pytest.mark.parametrize("options", MOUNTS.values(), ids=MOUNTS)
def test_a_cache_that_takes_no_more_gives_the_same_answer(world, namespace, options):
    world.folder.mkdir()
    mount = f'mount -t tmpfs -o mode=700,{options} none {world.folder} && exec "$@"'
    leftovers = "\nprint([name for name in os.listdir(cache.folder()) if not name.endswith('.c')])"
    assert world.ask(ASK + leftovers, under=[*namespace, "sh", "-c", mount, "sh"]).split("\n") == ["42", "[]"]
    assert not list(world.temporary.iterdir())


def test_a_disk_that_fills_while_writing_leaves_nothing(world):
    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    world.monkeypatch.setattr(os, "fsync", full)
    assert cache.library(SOURCE).answer() == 42
    assert not list(world.folder.iterdir())
    assert not list(world.temporary.iterdir())


def test_a_warm_cache_is_read_where_it_cannot_be_written(world, namespace):
    world.ask()
    mount = f'mount --bind {world.folder} {world.folder} && mount -o remount,bind,ro {world.folder} && exec "$@"'
    assert world.ask(under=[*namespace, "sh", "-c", mount, "sh"]) == "42"
    assert world.compilations() == 1


def test_a_cache_that_may_not_execute_gives_the_same_answer(world, namespace):
    world.folder.mkdir()
    mount = f'mount -t tmpfs -o mode=700,noexec none {world.folder} && exec "$@"'
    assert world.ask(under=[*namespace, "sh", "-c", mount, "sh"]) == "42"


def test_a_folder_that_cannot_be_made_gives_the_same_answer(world):
    world.folder.write_text("a file, where the folder should be")
    assert world.ask() == "42"


def test_without_room_for_temporary_files_the_cache_serves(world):
    world.monkeypatch.setattr("tempfile.tempdir", str(world.path / "missing"))
    assert cache.library(SOURCE).answer() == 42
    assert sorted(path.suffix for path in world.folder.iterdir()) == [".c", ".so"]


@pytest.mark.parametrize("folder", ["a file", "for all to write"])
def test_with_room_nowhere_the_refusal_says_so(world, folder):
    if folder == "a file":
        world.folder.write_text("where the folder should be")
    else:
        world.folder.mkdir()
        world.folder.chmod(0o777)
    world.monkeypatch.setattr("tempfile.tempdir", str(world.path / "missing"))
    with pytest.raises(cache.NoCompiler, match=r"nowhere to compile: .*missing.*; set UNFADING_CACHE or TMPDIR"):
        cache.library(SOURCE)


@pytest.mark.parametrize("stage", ["compiling", "writing", "publishing"])
def test_kill_9_leaves_a_usable_cache(world, stage):
    now = world.path / "now"
    waits = ""
    if stage == "compiling":
        world.set_compiler(f'case "$*" in *-shared*) touch {now}; sleep 30;; esac; exec {GCC} "$@"')
    else:
        # The source is stored first; the test waits for the second file, the library.
        function = {"writing": "fsync", "publishing": "replace"}[stage]
        waits = f"""
import time
real, calls = os.{function}, []
def wait(*arguments):
    calls.append(arguments)
    if len(calls) == 2:
        open({str(now)!r}, "w").close()
        time.sleep(30)
    return real(*arguments)
os.{function} = wait
"""
    process = world.start(waits + ASK)
    deadline = time.monotonic() + 20
    while not now.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    assert process.communicate()[0] == ""
    assert now.exists()
    assert not world.libraries()
    world.set_compiler(f'exec {GCC} "$@"')
    assert world.ask() == "42"
    assert world.ask("del compiler.build\n" + ASK) == "42"
    assert world.ask("cache.clear(); print(os.listdir(cache.folder()))") == "[]"


def test_no_compiler_on_path(world):
    world.monkeypatch.delenv("CC")
    world.monkeypatch.setenv("PATH", str(world.temporary))
    assert world.refusal() == "no C compiler was found: none of cc, gcc, clang is on PATH; install one or set CC"


def test_the_first_compiler_on_path_serves_without_cc(world):
    works = Path(os.environ["CC"])
    world.monkeypatch.setenv("CC", " ")
    world.monkeypatch.setenv("PATH", f"{world.path}:{os.environ['PATH']}")
    works.rename(world.path / "cc")
    assert world.ask() == "42"
    assert world.compilations() == 1


@pytest.mark.parametrize(
    ("cc", "sentence"),
    [
        (
            "no-such-cc -O1",
            "CC='no-such-cc -O1' names 'no-such-cc', which is not a program on this machine; correct it or unset it",
        ),
        ("gcc '", 'CC="gcc \'" cannot be read as a command: No closing quotation; correct it or unset it'),
        (
            "true",
            "true reported success and made no library, so it is not a C compiler; set CC to one; the source is stored in ",
        ),
        ("false", "false failed with exit status 1: it gave no message; the source is stored in "),
    ],
)
def test_a_wrong_cc_is_named_and_not_replaced(world, cc, sentence):
    world.monkeypatch.setenv("CC", cc)
    assert sentence in world.refusal()
    assert not world.libraries()


def test_a_program_of_another_machine_is_named(world):
    script = world.set_compiler("")
    script.write_bytes(b"\x7fELF")
    assert f"{script} cannot be run: Exec format error; set CC to a C compiler; the source is stored in " in world.refusal()


def test_a_failed_compilation_is_told_with_its_first_errors_and_the_source(world):
    wrong = "int f(void) {\n  return nothing;\n}"
    reason = world.refusal(wrong)
    (source,) = world.folder.glob("*.c")
    assert source.read_text() == wrong
    assert reason.endswith(f"; the source is stored in {source}")
    assert f"{source.name}:2:10: error: " in reason
    assert "nothing" in reason
    assert str(world.temporary) not in reason
    assert "\n" not in reason


def test_a_library_that_does_not_load_is_told(world):
    reason = world.refusal("int missing_function(void); int f(void) { return missing_function(); }")
    assert "made a library that does not load" in reason
    assert "missing_function" in reason


def test_a_source_that_could_not_be_kept_is_told(world):
    world.folder.mkdir()
    world.folder.chmod(0o777)
    assert f"the source was not stored, since {world.folder} could be written by another user" in world.refusal("wrong")


def test_a_failed_compilation_is_not_tried_again_unless_by_another_compiler(world):
    world.set_compiler("exit 1", name="broken")
    for _ in range(3):
        with pytest.raises(cache.NoCompiler, match="it gave no message"):
            cache.library(SOURCE)
    assert world.compilations() == 1
    world.set_compiler(f'exec {GCC} "$@"')
    assert cache.library(SOURCE).answer() == 42


@pytest.mark.parametrize(
    ("refused", "taken"),
    [("nothing", "-march=native"), ("*-march=native*", "-mcpu=native"), ("*=native*", None)],
)
def test_the_first_native_flag_that_the_compiler_takes_is_used(world, refused, taken):
    # Perhaps no compiler for this machine knows -mcpu, so the script accepts it and does not pass it on.
    drop = 'for word; do shift; [ "$word" = -mcpu=native ] || set -- "$@" "$word"; done'
    world.set_compiler(f'case "$*" in {refused}) exit 1;; esac; {drop}; exec {GCC} "$@"')
    assert cache.library(SOURCE).answer() == 42
    call = next(call for call in world.calls() if "-shared" in call)
    assert [word for word in call.split() if word.endswith("=native")] == ([taken] if taken else [])


NUMBERS = """
#include <math.h>
#include <string.h>
typedef float v8 __attribute__((vector_size(32)));
float halves(float x) { return x / 2; }
int is_nan(float x) { return x != x && isnan(x); }
float largest(float x) { return x + INFINITY; }
float zero(float x) { return x * 0.0f; }
float total(const float *x) {
    v8 a, b = {0};
    for (int i = 0; i < 16; i += 8) { memcpy(&a, x + i, sizeof a); b += a; }
    float sum = 0;
    for (int i = 0; i < 8; i++) sum += b[i];
    return expf(logf(sum));
}
"""


@pytest.mark.parametrize("name", ["gcc", "clang"])
def test_both_compilers_keep_denormals_nan_infinity_and_the_sign_of_zero(world, name):
    program = shutil.which(name)
    if program is None:
        pytest.skip(f"{name} is not installed")
    world.monkeypatch.setenv("CC", program)
    code = f"""
import ctypes, math
library = cache.library({NUMBERS!r})
for name in ("halves", "largest", "zero", "total"):
    getattr(library, name).restype = ctypes.c_float
number = ctypes.c_float
print(library.halves(number(2.0 ** -148)) == 2.0 ** -149, float("5e-324") / 1 > 0, library.is_nan(number(math.nan)),
      library.largest(number(1)), math.copysign(1, library.zero(number(-1))), round(library.total((number * 16)(*range(16)))))
"""
    assert world.ask(code) == "True True 1 inf -1.0 120"
    assert world.ask(code) == "True True 1 inf -1.0 120"
    assert len(world.libraries()) == 1


def test_clear_removes_ours_and_only_ours(world):
    world.ask()
    (library,) = world.libraries()
    torn = world.folder / f"{library.name}.abcd_123.tmp"
    torn.write_bytes(b"torn")
    others = [world.folder / name for name in ("notes.c", "other.so", f"{library.name}.orig", "0" * 32, library.name[1:])]
    for path in others:
        path.write_text("not ours")
    size = sum(path.stat().st_size for path in set(world.folder.iterdir()) - set(others))
    assert cache.describe()[4:6] == (1, size)
    assert cache.clear() == (1, size)
    assert set(world.folder.iterdir()) == set(others)
    assert cache.clear() == (0, 0)
    assert world.ask() == "42"


def test_clear_without_a_folder(world):
    assert cache.clear() == (0, 0)
    assert not world.folder.exists()


def test_where_the_folder_is(world):
    home, xdg = world.path / "home", world.path / "xdg"
    assert cache.folder() == world.folder
    world.monkeypatch.setenv("UNFADING_CACHE", "~/mine")
    assert cache.folder() == home / "mine"
    world.monkeypatch.setenv("UNFADING_CACHE", "")
    world.monkeypatch.setenv("XDG_CACHE_HOME", str(xdg))
    assert cache.folder() == xdg / "unfading"
    # By the standard, a relative path is ignored.
    world.monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache.folder() == home / ".cache" / "unfading"
    world.monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert cache.folder().name == f"unfading-{os.getuid()}"


def test_the_description(world):
    description = cache.describe()
    assert description.compiler == os.environ["CC"]
    assert description.version == subprocess.run([GCC, "--version"], capture_output=True, text=True).stdout.splitlines()[0]
    assert description.flags.split()[: len(compiler.FLAGS)] == list(compiler.FLAGS)
    assert (description.folder, description.entries, description.writable, description.trouble) == (world.folder, 0, True, "")
    assert not list(world.folder.iterdir())


def test_the_description_of_what_is_wrong(world):
    world.monkeypatch.setenv("CC", "no-such-cc")
    world.folder.mkdir()
    world.folder.chmod(0o777)
    description = cache.describe()
    assert (description.compiler, description.writable) == ("", False)
    assert "no-such-cc" in description.trouble
    assert f"{world.folder} could be written by another user" in description.trouble


def wait_for_the_end_of(pid, seconds=10):
    deadline = time.monotonic() + seconds
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return not Path(f"/proc/{pid}").exists()


def test_a_compiler_that_hangs_is_stopped_with_what_it_started(world):
    child = world.path / "child"
    world.set_compiler(f'case "$*" in *-shared*) sleep 60 & echo $! > {child}; wait;; esac; exec {GCC} "$@"')
    world.monkeypatch.setenv("UNFADING_COMPILE_SECONDS", "0.5")
    reason = world.refusal()
    assert "did not finish within 0.5 s and was stopped; set UNFADING_COMPILE_SECONDS to a longer time" in reason
    assert wait_for_the_end_of(int(child.read_text()))
    assert not list(world.temporary.iterdir())
    world.monkeypatch.setenv("UNFADING_COMPILE_SECONDS", "")
    world.set_compiler(f'exec {GCC} "$@"')
    assert world.ask() == "42"


def test_a_compiler_that_hangs_at_every_question_is_asked_once(world):
    world.set_compiler("sleep 60")
    world.monkeypatch.setenv("UNFADING_COMPILE_SECONDS", "0.3")
    world.monkeypatch.setattr(compiler, "_hanging", {})
    for source in (SOURCE, SOURCE.replace("42", "43")):
        with pytest.raises(cache.NoCompiler, match=r"did not answer within 0\.3 s and was stopped; set CC to another"):
            cache.library(source)
    assert len(world.calls()) == 1
    assert "did not answer" in cache.describe().trouble


def test_auto_takes_the_reference_loop_where_the_compiler_hangs(world):
    import torch

    import unfading

    world.set_compiler("sleep 60")
    world.monkeypatch.setenv("UNFADING_COMPILE_SECONDS", "0.3")
    world.monkeypatch.setattr(compiler, "_hanging", {})
    layer, x = unfading.STAR(3, 11), torch.randn(4, 2, 3)
    with torch.no_grad():
        got = layer(x)[0]
        layer.backend = "reference"
        assert torch.equal(got, layer(x)[0])


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan", "inf"])
def test_a_wrong_time_limit_is_named(world, text):
    world.monkeypatch.setenv("UNFADING_COMPILE_SECONDS", text)
    assert f"UNFADING_COMPILE_SECONDS={text!r} is not a number of seconds above 0" in world.refusal()


def sources(count):
    return [SOURCE.replace("42", str(100 + i)) for i in range(count)]


def test_the_oldest_libraries_are_removed_at_the_limit(world):
    made = sources(4)
    for source in made[:2]:
        cache.library(source)
    one = sum(path.stat().st_size for path in world.folder.iterdir()) // 2
    # Room for three; the first is used again, so the second is the oldest.
    world.monkeypatch.setenv("UNFADING_CACHE_MB", str(3.4 * one / 1e6))
    past = time.time() - 1000
    for path in world.folder.iterdir():
        os.utime(path, (past, past))
    cache._loaded.clear()
    assert cache.library(made[0]).answer() == 100
    for source in made[2:]:
        cache.library(source)
    texts = {path.read_text() for path in world.folder.glob("*.c")}
    assert texts == {made[0], *made[2:]}
    assert len(world.libraries()) == 3
    # A library that is loaded goes on after its file was removed.
    world.monkeypatch.setenv("UNFADING_CACHE_MB", "0")
    library = cache.library(SOURCE)
    assert not world.libraries()
    assert library.answer() == 42
    assert cache.describe().limit == 0


def test_eight_processes_at_the_limit(world):
    world.monkeypatch.setenv("UNFADING_CACHE_MB", "0.04")
    code = "for i in range(6): assert cache.library(SOURCE.replace('42', str(i))).answer() == i"
    processes = [world.start(code + "\nprint(42)") for _ in range(8)]
    assert [process.communicate(timeout=60) for process in processes] == [("42\n", "")] * 8
    assert cache.describe().bytes <= 40_000


def test_remnants_of_killed_processes_are_removed_and_files_in_the_making_are_not(world):
    world.ask()
    old, young = (world.folder / f"{'0' * 32}.c.abcd_12{i}.tmp" for i in range(2))
    for path in (old, young):
        path.write_bytes(b"torn")
    past = time.time() - 2 * cache.REMNANT_SECONDS
    os.utime(old, (past, past))
    cache.library(sources(1)[0])
    assert not old.exists()
    assert young.exists()


@pytest.mark.parametrize("text", ["much", "-1", "nan"])
def test_a_wrong_limit_of_the_folder_is_named(world, text):
    world.monkeypatch.setenv("UNFADING_CACHE_MB", text)
    assert f"UNFADING_CACHE_MB={text!r} is not a number of megabytes" in world.refusal()
