# SPDX-License-Identifier: Apache-2.0
"""How the process of a rank ends."""

import sys

import pytest
from places import ROOT

from examples.gpt import __main__

RANK = """
import atexit, sys
import examples.gpt.__main__ as command
def train(arguments, config):
    # As what a thread of gloo still holds when the interpreter shuts down.
    atexit.register(print, "shutdown")
    print("trained", end="")
    {action}
command.train, command.log_warnings = train, lambda path: None
sys.argv = ["examples.gpt", "--config", {config!r}]
command.main()
"""
CONFIG = str(ROOT / "configs" / "zero2_offload.json")
AS_RANK = {"RANK": "0", "LOCAL_RANK": "0"}


def test_rank_that_has_trained_ends_with_its_output_and_without_shutdown(forks):
    done = forks.run(RANK.format(action="pass", config=CONFIG), **AS_RANK)
    assert done.returncode == 0, done.stderr
    # DeepSpeed may have said something before.
    assert done.stdout.endswith("trained") and "shutdown" not in done.stdout


@pytest.fixture
def refused(monkeypatch, capsys):
    """Return a function: what the program says of arguments that it refuses."""

    def said(*words):
        monkeypatch.setattr(sys, "argv", ["examples.gpt", *words])
        with pytest.raises(SystemExit, match="2"):
            __main__.main()
        return capsys.readouterr().err

    return said


@pytest.mark.parametrize("words", [[], ["--config", "a.toml", "--optimizer", "AdamW"]])
def test_int8_weights_with_what_does_not_step_them_are_refused(refused, words):
    assert "expected float32" in refused("--weights", "int8", *words)


WITHOUT_TORCHAO = """
import sys
import examples.gpt.__main__ as command
sys.modules["torchao"] = None  # as where it is not installed
sys.argv = ["examples.gpt", "--weights", "int8", *{words!r}]
command.main()
"""


def test_int8_weights_without_torchao_name_its_extra_and_delete_no_checkpoint(forks, tmp_path):
    checkpoint = tmp_path / "out" / "Adam8bitBlockwise.checkpoint"
    checkpoint.mkdir(parents=True)
    config = ROOT / "configs" / "fsdp2_offload.toml"
    words = ["--config", str(config), "--data", str(ROOT / "zero8")]
    words += ["--out", str(checkpoint.parent)]
    done = forks.run(WITHOUT_TORCHAO.format(words=words), **AS_RANK)
    assert done.returncode == 2, done.stderr
    expected = "python -m examples.gpt: needs torchao: pip install 'zero8[torchao]'\n"
    assert done.stderr.endswith(expected) and "Traceback" not in done.stderr
    assert checkpoint.is_dir()


def test_rank_that_fails_ends_with_the_error(forks):
    done = forks.run(RANK.format(action="raise OSError('disk full')", config=CONFIG), **AS_RANK)
    assert done.returncode == 1
    assert "OSError: disk full" in done.stderr
