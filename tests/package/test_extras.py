# SPDX-License-Identifier: Apache-2.0
"""Where only the base dependencies are installed, help works and commands name their extra."""

import pytest
import torch
from forks import Forks
from processes import without

import zero8
from zero8 import cli
from zero8.checkpoint.commands.command import HELP
from zero8.environment import packages

# Of the process and its forks; the import takes seconds, which each fork would.
BASE_ONLY = f"{without(*packages.EXTRAS)}import torch.distributed.checkpoint"
CLI = "import sys; from zero8 import cli; sys.exit(cli.main())"
COMMANDS = ["", "doctor", "plan", "bench", "checkpoint", *(f"checkpoint {name}" for name in HELP)]


@pytest.fixture(scope="module")
def base_only(tmp_path_factory):
    """Return a function that runs code with arguments where only the base is installed."""
    forks = Forks(tmp_path_factory.mktemp("base_only"), BASE_ONLY)
    yield forks.run
    forks.close()


@pytest.mark.parametrize("words", COMMANDS)
def test_help_of_a_command_works_without_extras(base_only, words):
    done = base_only(CLI, *words.split(), "--help")
    assert done.returncode == 0, done.stderr
    assert f"usage: zero8 {words}".rstrip() in done.stdout


@pytest.mark.parametrize(
    ("words", "command", "package", "extra"),
    [
        (["--model", "config.json"], "plan", "transformers", "plan"),
        (["plain.pt", "--plot", "out"], "checkpoint inspect", "matplotlib", "bench"),
    ],
)
def test_command_without_its_extra_names_it_in_one_line(
    base_only, words, command, package, extra, tmp_path
):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    param = torch.nn.Parameter(torch.ones(64, 64))
    param.grad = torch.ones(64, 64)
    optimizer = zero8.Adam8bitBlockwise([param], lr=1e-3)
    optimizer.step()
    torch.save({"optimizer": optimizer.state_dict()}, tmp_path / "plain.pt")
    paths = [str(tmp_path / word) if not word.startswith("-") else word for word in words]
    done = base_only(CLI, *command.split(), *paths)
    expected = f"zero8 {command}: needs {package}: pip install 'zero8[{extra}]'\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", expected)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("words", [[], ["checkpoint"]])
def test_command_without_its_subcommand_prints_help_and_exits_2(words, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    printed = capsys.readouterr()
    assert (caught.value.code, printed.out) == (2, "")
    assert " ".join(["usage: zero8", *words]) in printed.err and "--help" in printed.err
