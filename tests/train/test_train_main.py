# SPDX-License-Identifier: Apache-2.0
"""How the process of a rank ends."""

import sys

import pytest
from places import ROOT

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


@pytest.fixture
def refused(monkeypatch, capsys):
    """Return a function: what the program says of arguments that it refuses."""

    def said(*words):
        monkeypatch.setattr(sys, "argv", ["examples.gpt", *words])
        with pytest.raises(SystemExit, match="2"):
            __main__.main()
        return capsys.readouterr().err

    return said


def test_optimizer_without_a_twin_is_refused_with_those_that_have_one(refused):
    said = refused("--engine", "fsdp2", "--optimizer", "Lion8bitBlockwise")
    assert "got Lion8bitBlockwise for the engine fsdp2" in said
    assert "expected one of ['AdamW', 'Adam8bitBlockwise', 'SGD', 'SGD8bitBlockwise']" in said


@pytest.mark.parametrize("words", [["--engine", "deepspeed"], ["--optimizer", "AdamW"]])
def test_int8_weights_with_what_does_not_step_them_are_refused(refused, words):
    assert "expected float32" in refused("--weights", "int8", *words)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "deepspeed configs/zero2_offload.json runs/demo"),
        (["--weights", "int8"], "fsdp2 configs/fsdp2_offload.toml runs/demo-fsdp2-int8"),
        (
            ["--weights", "int8", "--codec", "fp8", "--optimizer", "SGD8bitBlockwise"],
            "fsdp2 configs/fsdp2_offload_sgd.toml runs/demo-fsdp2-sgd-fp8-int8",
        ),
    ],
)
def test_engine_config_and_folder_by_default_are_those_of_the_weights(forks, words, expected):
    code = RANK.replace('"1"]', f'"1", *{words!r}]')
    action = 'print("", arguments["engine"], arguments["config"], arguments["out"], end="")'
    done = forks.run(code.format(action=action), LOCAL_RANK="0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"trained {expected}")


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
    done = forks.run(WITHOUT_TORCHAO.format(words=words), RANK="0", LOCAL_RANK="0")
    assert done.returncode == 2, done.stderr
    expected = "python -m examples.gpt: needs torchao: pip install 'zero8[torchao]'\n"
    assert done.stderr.endswith(expected) and "Traceback" not in done.stderr
    assert checkpoint.is_dir()


def test_rank_that_fails_ends_with_the_error(forks):
    done = forks.run(RANK.format(action="raise OSError('disk full')"), LOCAL_RANK="0")
    assert done.returncode == 1
    assert "OSError: disk full" in done.stderr
