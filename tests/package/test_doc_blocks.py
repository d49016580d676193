# SPDX-License-Identifier: Apache-2.0
"""Every block of README.md and docs/ is run, or known not to be; the quick ones are run here."""

import ast
import json
import logging
import re
import shlex

import pytest
import torch
from doc_blocks import PAGES, block_with, blocks_of, reader, type_in
from doc_ledger import NOT_RUN, RUN
from places import ROOT, TESTS
from processes import run
from small_checkpoints import plain_file

import zero8
from zero8 import cli
from zero8.checkpoint.commands.convert import convert
from zero8.state.tell import tell_once

BLOCKS = [block for page in PAGES for block in blocks_of(page)]
ENTRIES = {page: {**RUN.get(page, {}), **NOT_RUN.get(page, {})} for page in {*RUN, *NOT_RUN}}


def parameters_of_tests():
    """Return the names of the parameters of every test, by its name."""
    trees = [ast.parse(path.read_text()) for path in TESTS.rglob("test_*.py")]
    functions = [node for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)]
    return {node.name: {arg.arg for arg in node.args.args} for node in functions}


def test_ledger_has_each_block_of_the_pages_once():
    """A new block needs a test that runs it, in `RUN`, or the reason why none can, in `NOT_RUN`."""
    assert len(BLOCKS) > 40
    undecided = []
    for block in BLOCKS:
        known = [phrase for phrase in ENTRIES.get(block.page, {}) if phrase in block.text]
        if len(known) != 1:
            undecided.append((block.page, block.text.splitlines()[0], known))
    assert undecided == []


def test_ledger_has_no_entry_without_a_block():
    for page, entries in ENTRIES.items():
        assert [block_with(page, phrase).page for phrase in entries] == [page] * len(entries)
    for page in RUN.keys() & NOT_RUN.keys():
        assert not RUN[page].keys() & NOT_RUN[page].keys()


def test_ledger_names_tests_that_take_their_blocks_from_the_page():
    parameters = parameters_of_tests()
    named = {test for entries in RUN.values() for test in entries.values()}
    assert [name for name in named if not parameters.get(name, set()) & {"block", "blocks"}] == []


def test_every_fence_of_the_pages_is_that_of_a_block():
    for page in PAGES:
        fences = re.findall(r"^ *(?:```|~~~)", (ROOT / page).read_text(), re.MULTILINE)
        assert len(fences) == 2 * len(blocks_of(page)), page


def test_python_block_of_the_docs_runs(block, capsys):
    exec(block.text, {})
    printed = capsys.readouterr().out
    assert ("print" in block.text) == bool(printed)


def test_optimizer_section_of_the_docs_makes_that_optimizer(block):
    section = json.loads(block.text)["optimizer"]
    p = torch.nn.Parameter(torch.ones(64, 64))
    made = getattr(torch.optim, section["type"])([("weight", p)], **section["params"])
    assert made.param_groups[0].items() >= section["params"].items()


def test_word_to_change_is_the_only_difference_from_a_config_of_adamw(block):
    lines = block.text.splitlines()
    sections = [
        json.loads("{" + "".join(line[1:] for line in lines if line[0] in marks).rstrip(",") + "}")
        for marks in (" -", " +")
    ]
    before, after = (section["optimizer"] for section in sections)
    assert before | {"type": after["type"]} == after
    assert issubclass(getattr(torch.optim, before["type"]), torch.optim.AdamW)
    for path in (ROOT / "configs" / "hf").glob("*.json"):
        assert json.loads(path.read_text())["optimizer"] == after


def test_json_of_trainer_is_the_section_of_its_configs(block):
    section = json.loads(block.text)
    for path in (ROOT / "configs" / "hf").glob("*.json"):
        assert section.items() <= json.loads(path.read_text()).items()


def test_yaml_names_a_deepspeed_config_that_is_there(block):
    (name,) = re.findall(r"^deepspeed: (\S+)$", block.text, re.MULTILINE)
    assert json.loads((ROOT / name).read_text())["optimizer"]["type"] == "Adam8bitBlockwise"


def test_commands_for_a_bitsandbytes_file_make_one_to_load(
    block, tmp_path, monkeypatch, capsys, caplog
):
    convert(plain_file(tmp_path / "ours.pt", "dynamic"), tmp_path / "bnb.pt", "bitsandbytes")
    monkeypatch.chdir(tmp_path)
    for command in block.commands:
        program, *words = shlex.split(command)
        assert (program, cli.main(words)) == ("zero8", 0), capsys.readouterr()
    content = torch.load("zero8.pt")
    model = {name: torch.nn.Parameter(p) for name, p in content["model"].items()}
    optimizer = zero8.Adam8bitBlockwise(list(model.items()), codec="dynamic")
    optimizer.load_state_dict(content["optimizer"])
    assert optimizer.memory_report().to_dicts()
    assert "were saved with" not in caplog.text


def test_load_with_other_settings_logs_the_line_that_the_docs_show(block, caplog):
    def optimizer(**settings):
        params = {f"p{number}": torch.nn.Parameter(torch.ones(32, 256)) for number in range(6)}
        for p in params.values():
            p.grad = p.detach().clone()
        return zero8.Adam8bitBlockwise(list(params.items()), weight_decay=0.0, **settings)

    saved = optimizer(codec="dynamic", block_size=128)
    saved.step()
    tell_once.cache_clear()
    with caplog.at_level(logging.WARNING, "zero8"):
        optimizer().load_state_dict(saved.state_dict())
    (line,) = caplog.messages
    assert line.startswith(block.text.removesuffix("...\n"))


def test_adamw_that_is_given_8_bit_states_raises_what_the_docs_show(block):
    p = torch.nn.Parameter(torch.ones(32, 256))
    p.grad = torch.ones_like(p)
    optimizer = zero8.Adam8bitBlockwise([p], weight_decay=0.0)
    optimizer.step()
    with pytest.raises(ValueError) as raised:
        torch.optim.AdamW([p]).load_state_dict(optimizer.state_dict())
    assert f"ValueError: {raised.value}" == " ".join(block.text.split())


# --- Of blocks that are not run ------------------------------------------------------------------


def test_make_targets_of_the_readme_are_those_of_the_makefile():
    for command in block_with("README.md", "make train     #").commands:
        words = shlex.split(command, comments=True)
        done = run(["make", "--directory", str(ROOT), "-n", *words[1:]], MAKEFLAGS="")
        assert (words[0], done.returncode) == ("make", 0), done.stderr


def test_script_of_the_readme_for_several_hosts_would_start_a_rank_on_each(tmp_path):
    (tmp_path / "hosts").write_text("node0 slots=1\nnode1 slots=1\n")
    (tmp_path / "launch").symlink_to(ROOT / "launch")
    block = block_with("README.md", "HOSTFILE=hosts")
    # What the launcher would be told, as the script's Python is `echo`.
    words = shlex.split(type_in(reader(tmp_path), f"PYTHON=$(type -P echo) {block.text.strip()}"))
    *_, script, option, config = words
    assert (script, option) == ("train.py", "--deepspeed_config")
    assert (ROOT / config).is_file()
    assert words[words.index("--hostfile") + 1] == "hosts"


def test_extras_that_pages_install_are_those_of_the_package():
    declared = (ROOT / "pyproject.toml").read_text()
    for page in PAGES:
        text = (ROOT / page).read_text()
        for names in re.findall(r"pip install '(?:zero8|\.)\[([\w,]+)\]", text):
            for name in names.split(","):
                assert name == "X" or re.search(rf"^{name} = \[", declared, re.MULTILINE), page
