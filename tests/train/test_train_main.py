# SPDX-License-Identifier: Apache-2.0
"""How the process of a rank ends."""

import sys

import pytest

from examples.gpt import __main__

RANK = """
import atexit, sys
import examples.gpt.__main__ as command
def train(**arguments):
    # As what a thread of gloo still holds when the interpreter shuts down.
    atexit.register(print, "shutdown")
    print("trained", end="")
    {action}
command.train = train
sys.argv = ["examples.gpt", "--steps", "1"]
command.main()
"""


def test_rank_that_has_trained_ends_with_its_output_and_without_shutdown(forks):
    done = forks.run(RANK.format(action="pass"), LOCAL_RANK="0")
    assert done.returncode == 0, done.stderr
    # DeepSpeed may have said something before.
    assert done.stdout.endswith("trained") and "shutdown" not in done.stdout


def test_optimizer_without_a_twin_is_refused_with_those_that_have_one(monkeypatch, capsys):
    words = ["examples.gpt", "--engine", "fsdp2", "--optimizer", "Lion8bitBlockwise"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit, match="2"):
        __main__.main()
    said = capsys.readouterr().err
    assert "got optimizer Lion8bitBlockwise for the engine fsdp2" in said
    assert "expected one of ['AdamW', 'Adam8bitBlockwise', 'Adam8bitShared', 'SGD'" in said


def test_rank_that_fails_ends_with_the_error(forks):
    done = forks.run(RANK.format(action="raise OSError('disk full')"), LOCAL_RANK="0")
    assert done.returncode == 1
    assert "OSError: disk full" in done.stderr
