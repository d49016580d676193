# SPDX-License-Identifier: Apache-2.0
"""Where only the base dependencies are installed, help works and commands name their extra."""

import argparse
import json
import re

import pytest
import torch
from forks import Forks

import zero8
from zero8 import cli
from zero8.environment import extras

# No package of an extra can be imported in this process and its forks.
BASE_ONLY = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {refused!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Refuse())
import torch
"""
BASE_ONLY = BASE_ONLY.format(refused=set(extras.EXTRAS))
# Prints the exit status and the last line of the help of every command.
EVERY_HELP = """
import contextlib, io, json, sys
from zero8 import cli

statuses = {}
for words in json.loads(sys.argv[1]):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            cli.main([*words, "--help"])
        except SystemExit as end:
            status = end.code
    statuses[" ".join(words)] = [status, printed.getvalue()]
print(json.dumps(statuses))
"""


def commands(parser, words=()):
    """Return the words of all commands below a parser, and its own."""
    parser.complete()
    found = [words]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                found += commands(below, (*words, name))
    return found


@pytest.fixture(scope="module")
def base_only(tmp_path_factory):
    """Return a function that runs code with arguments where only the base is installed."""
    forks = Forks(tmp_path_factory.mktemp("base_only"), BASE_ONLY)
    yield forks.run
    forks.close()


def test_help_of_every_command_works_without_extras(base_only):
    done = base_only(EVERY_HELP, json.dumps(commands(cli.make_parser())))
    assert done.returncode == 0, done.stderr
    for words, (status, printed) in json.loads(done.stdout.splitlines()[-1]).items():
        assert status == 0, (words, printed)
        assert f"usage: zero8 {words}".rstrip() in printed


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A checkpoint of plain PyTorch."""
    path = tmp_path_factory.mktemp("checkpoint") / "plain.pt"
    param = torch.nn.Parameter(torch.ones(64, 64))
    param.grad = torch.ones(64, 64)
    optimizer = zero8.Adam8bitBlockwise([param], lr=1e-3)
    optimizer.step()
    torch.save({"optimizer": optimizer.state_dict()}, path)
    return path


@pytest.mark.parametrize(
    ("words", "package", "extra"),
    [
        ("plan --model CONFIG", "transformers", "plan"),
        ("checkpoint inspect CHECKPOINT --plot OUT", "matplotlib", "bench"),
    ],
)
def test_command_without_its_extra_names_it_in_one_line(
    base_only, words, package, extra, checkpoint, tmp_path
):
    out, config = tmp_path / "out", tmp_path / "config.json"
    config.write_text('{"model_type": "llama"}')
    names = {"OUT": out, "CHECKPOINT": checkpoint, "CONFIG": config}
    arguments = [str(names.get(word, word)) for word in words.split()]
    done = base_only("import sys; from zero8 import cli; sys.exit(cli.main())", *arguments)
    command = re.match(r"(?:[a-z]+ ?)+(?= |$)", words)[0].strip()
    expected = f"zero8 {command}: needs {package}: pip install 'zero8[{extra}]'\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", expected)
    assert not out.exists()


@pytest.mark.parametrize("words", [[], ["checkpoint"]])
def test_command_without_its_subcommand_prints_help_and_exits_2(words, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    printed = capsys.readouterr()
    assert (caught.value.code, printed.out) == (2, "")
    assert " ".join(["usage: zero8", *words]) in printed.err and "--help" in printed.err
