"""A script that the zygote forks does what one does that was started fresh."""

from __future__ import annotations

import signal

import pytest

ENDS = {
    "its last line": "print('end')",
    "sys.exit": "import sys; print('out'); sys.exit(3)",
    "a message": "import sys; sys.exit('a message')",
    "an exception": "raise ValueError('of the script')",
    "a mistake in it": "print('unclosed'",
    "os._exit": "import os; print('kept back'); os._exit(5)",
    "Ctrl-C": "import os, signal; os.kill(os.getpid(), signal.SIGINT); input()",
    "abort": "import os; os.abort()",
    "atexit": "import atexit; atexit.register(print, 'at exit')",
    "output of C": "import ctypes; ctypes.CDLL(None).printf(b'kept back')",
    "what C does at exit": """
import ctypes
libc = ctypes.CDLL(None)
libc.on_exit(libc.puts, b"at exit")
""",
    "a thread": "import threading; threading.Thread(target=print, args=('thread',)).start()",
}
SEEN = """
    import multiprocessing, os, signal, sys, threading

    def seen():
        handlers = [str(signal.getsignal(number)) for number in range(1, 32)]
        return handlers, str(sys.flags), sorted(os.listdir("/proc/self/fd")), os.getcwd()

    if __name__ == "__main__":
        print(__name__, __file__.startswith(os.getcwd()), sys.argv[1:], sys.path, sys.orig_argv[2:])
        print(*seen(), sep="\\n")
        print(os.getsid(0) == os.getpid(), threading.active_count())
        print(sorted(name for name in sys.modules if "stocache" in name), os.environ.get("HELLO"))
        print(sys.stdin.encoding, sys.stdout.line_buffering, sys.stderr.errors, sys.stdin.read())
        for start in ("spawn", "fork"):
            with multiprocessing.get_context(start).Pool(1) as pool:
                print(pool.apply(seen)[0])
"""


def both(run_script, source, *args, **options):
    return [
        run_script(source, *args, check=False, fresh=fresh, **options) for fresh in (True, False)
    ]


@pytest.mark.parametrize("end", ENDS)
def test_a_script_ends_as_a_fresh_one(run_script, end):
    fresh, forked = (
        (done.returncode, done.stdout, done.stderr.replace(done.args[1], "FILE"))
        for done in both(run_script, ENDS[end])
    )
    assert forked == fresh


def test_a_script_sees_what_a_fresh_one_sees(run_script):
    fresh, forked = both(run_script, SEEN, 7, "of", env={"HELLO": "there"})
    assert fresh.returncode == 0 and "there" in fresh.stdout
    for one, other in zip(forked.stdout.split("\n"), fresh.stdout.split("\n"), strict=True):
        assert one == other
    assert (forked.returncode, forked.stderr) == (0, fresh.stderr)


def test_a_script_of_the_zygote_can_be_killed(run_script):
    child = run_script.start("import time; print('up', flush=True); time.sleep(100)")
    assert child.stdout.readline() == "up\n" and child.poll() is None
    run_script.kill_group(child)
    assert child.returncode == -signal.SIGKILL


def test_an_environment_that_counts_at_the_start_is_given_to_a_fresh_one(run_script):
    source = "import sys; print(sys.flags.hash_randomization, 'torch' in sys.modules)"
    assert run_script(source, env={"PYTHONHASHSEED": "0"}).stdout == "0 False\n"
    assert run_script(source, fresh=True).stdout == "1 False\n"
    assert run_script(source).stdout == "1 True\n"


def test_two_scripts_draw_other_numbers(run_script):
    source = (
        "import random, numpy, torch; print(random.random(), numpy.random.rand(), torch.rand(()))"
    )
    one, other = (run_script(source).stdout.split() for _ in range(2))
    assert not set(one) & set(other)
