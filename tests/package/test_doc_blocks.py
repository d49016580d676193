# SPDX-License-Identifier: Apache-2.0
"""Blocks of the docs, run as the pages show them; those that need other packages are elsewhere."""

import json
import logging
import re
import shlex

import pytest
import torch
from doc_blocks import PAGES
from places import ROOT
from small_checkpoints import plain_file

import zero8
from zero8 import cli
from zero8.checkpoint.commands.convert import convert
from zero8.state.tell import tell_once


@pytest.mark.shown("docs/algorithms.md", "zero8.Muon8bitBlockwise")
@pytest.mark.shown("docs/faq.md", 'float("inf")', "zero8.export")
@pytest.mark.shown("docs/from-bitsandbytes.md", "fp32_params")
def test_python_block_of_the_docs_runs(block, capsys):
    exec(block.text, {})
    printed = capsys.readouterr().out
    assert ("print" in block.text) == bool(printed)


@pytest.mark.shown("docs/algorithms.md", "SGD8bitBlockwise", '"type": "Muon8bitBlockwise"')
def test_optimizer_section_of_the_docs_makes_that_optimizer(block):
    section = json.loads(block.text)["optimizer"]
    p = torch.nn.Parameter(torch.ones(64, 64))
    made = getattr(torch.optim, section["type"])([("weight", p)], **section["params"])
    assert made.param_groups[0].items() >= section["params"].items()


@pytest.mark.shown("docs/from-adamw-to-8-bit.md", '+    "type"')
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


@pytest.mark.shown("docs/integrations.md", '"weight_decay": "auto"')
def test_json_of_trainer_is_the_section_of_its_configs(block):
    section = json.loads(block.text)
    for path in (ROOT / "configs" / "hf").glob("*.json"):
        assert section.items() <= json.loads(path.read_text()).items()


@pytest.mark.shown("docs/integrations.md", "learning_rate: 2e-5", "finetuning_type")
def test_yaml_names_a_deepspeed_config_that_is_there(block):
    (name,) = re.findall(r"^deepspeed: (\S+)$", block.text, re.MULTILINE)
    assert json.loads((ROOT / name).read_text())["optimizer"]["type"] == "Adam8bitBlockwise"


@pytest.mark.shown("docs/from-bitsandbytes.md", "zero8 checkpoint inspect bnb.pt")
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


@pytest.mark.shown("docs/how-it-works.md", "were saved with")
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


@pytest.mark.shown("docs/integrations.md", "ValueError: load_state_dict")
def test_adamw_that_is_given_8_bit_states_raises_what_the_docs_show(block):
    p = torch.nn.Parameter(torch.ones(32, 256))
    p.grad = torch.ones_like(p)
    optimizer = zero8.Adam8bitBlockwise([p], weight_decay=0.0)
    optimizer.step()
    with pytest.raises(ValueError) as raised:
        torch.optim.AdamW([p]).load_state_dict(optimizer.state_dict())
    assert f"ValueError: {raised.value}" == " ".join(block.text.split())


def test_extras_that_pages_install_are_those_of_the_package():
    declared = (ROOT / "pyproject.toml").read_text()
    for page in PAGES:
        text = (ROOT / page).read_text()
        for names in re.findall(r"pip install '(?:zero8|\.)\[([\w,]+)\]", text):
            for name in names.split(","):
                assert name == "X" or re.search(rf"^{name} = \[", declared, re.MULTILINE), page
