# SPDX-License-Identifier: Apache-2.0
"""The process that a command of `zero8 checkpoint` runs in, and the one that waits for it.

Neither needs torch here, whose import takes seconds.  One test starts the command with it.
"""

import os
import select
import signal
import sys
from contextlib import contextmanager

import pytest
from processes import python, started

LIMIT_SECONDS = 60
WITHOUT_TORCH = """
import sys, warnings
sys.modules["torch"] = None
warnings.simplefilter("ignore")  # zero8 says that it cannot register itself
"""
CLI = """
import os, resource, signal, sys
from zero8 import cli
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
# Ignored in jobs of a shell's background, and under nohup.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
def command(argv):
    {command}
cli._main, sys.argv = command, ["zero8", "checkpoint", *{arguments}]
sys.exit(cli.main())
"""
WAIT = "print(os.getpid(), flush=True); [signal.sigtimedwait([], 1) for _ in iter(int, 1)]"
"""A command that waits for ever, when it has said which process it is in.

Not by one pause(): of a signal that comes just before it, Python would call the handler after it.
"""


def code_of(command, *arguments, before=WITHOUT_TORCH):
    return before + CLI.format(command=command, arguments=arguments)


@contextmanager
def waiting(*arguments, **how):
    """Start zero8 with a command that waits; yield its process, the child, and a handle of that."""
    with started([sys.executable, "-c", code_of(WAIT, *arguments, **how)]) as process:
        readable, _, _ = select.select([process.stdout], [], [], LIMIT_SECONDS)
        assert readable, "time limit"
        child = int(process.stdout.readline())
        assert child != process.pid
        descriptor = os.pidfd_open(child)
        try:
            yield process, child, descriptor
        finally:
            os.close(descriptor)


def has_ended(descriptor):
    """Return whether a process ends within the time limit."""
    return bool(select.select([descriptor], [], [], LIMIT_SECONDS)[0])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_signal_sent_to_the_parent_alone_ends_both_with_it(number):
    with waiting() as (process, _, descriptor):
        process.send_signal(number)
        assert has_ended(descriptor)
        assert process.wait(LIMIT_SECONDS) == -number


def test_signal_sent_to_the_parent_alone_ends_both_with_it_where_torch_is_imported():
    with waiting(before="import torch") as (process, _, descriptor):
        process.send_signal(signal.SIGTERM)
        assert has_ended(descriptor)
        assert process.wait(LIMIT_SECONDS) == -signal.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_signal_that_ends_the_child_ends_the_parent_without_a_traceback(number):
    with waiting() as (process, child, _):
        os.kill(child, number)
        out, err = process.communicate(timeout=LIMIT_SECONDS)
        assert (process.returncode, out, err) == (-number, "", "")


def test_child_does_not_outlive_a_killed_parent():
    with waiting() as (process, _, descriptor):
        process.kill()
        assert process.wait(LIMIT_SECONDS) == -signal.SIGKILL
        assert has_ended(descriptor)


@pytest.mark.parametrize("json", [False, True])
def test_child_that_ends_by_sigbus_is_status_2_and_a_message(json):
    with waiting("verify", *["--json"] * json) as (process, child, _):
        os.kill(child, signal.SIGBUS)
        out, err = process.communicate(timeout=LIMIT_SECONDS)
        assert (process.returncode, err) == (2, "")
        assert "a file was cut short while it was read" in out
        assert out.startswith('{\n  "error": "zero8 checkpoint verify' if json else "zero8 ")


@pytest.mark.parametrize("ending", ["return 0", "return 3", "sys.exit(3)", "os._exit(3)"])
def test_exit_status_of_the_child_is_that_of_the_parent(ending):
    done = python(code_of(ending), LIMIT_SECONDS)
    assert done.returncode == (0 if ending == "return 0" else 3), done.stderr
