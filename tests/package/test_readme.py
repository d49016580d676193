# SPDX-License-Identifier: Apache-2.0
"""What README shows must run, and what it says of defaults must be so."""

import inspect
import json
import re

import torch
from places import ROOT

import zero8
from zero8.optimizer import Adam8bitBlockwise

README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_readme_python_example_runs_and_prints_the_report(capsys):
    (example,) = blocks("python")
    exec(example, {})
    assert "8-bit: 131,072 elements" in capsys.readouterr().out


def test_readme_json_example_is_a_config_of_our_optimizer():
    (example,) = blocks("json")
    section = json.loads(example)["optimizer"]
    optimizer_class = getattr(torch.optim, section["type"])
    assert optimizer_class is zero8.Adam8bitBlockwise
    optimizer_class([torch.nn.Parameter(torch.zeros(2, 2))], **section["params"])


def test_readme_table_of_settings_names_the_defaults():
    rows = re.findall(r"^\| `(\w+)` \| `?(.*?)`? \|", README, re.MULTILINE)
    parameters = inspect.signature(Adam8bitBlockwise.__init__).parameters
    assert len(rows) == 8
    for name, default in rows:
        expected = parameters[name].default
        assert json.loads(default) == (list(expected) if expected == () else expected), name


def test_readme_figure_is_there():
    for path in re.findall(r"!\[.*?\]\((.*?)\)", README):
        assert (ROOT / path).is_file()


def test_readme_bytes_of_the_demo_are_those_of_its_record():
    record = ROOT / "zero8" / "bench" / "records" / "demo_cpu_202611.json"
    for run in json.loads(record.read_text())["runs"]:
        assert f"{run['state_bytes_per_param']:.3f}" in README
        assert f"{run['val_loss']:.4f}" in README
        assert f"{run['step_ms']:.2f}" in README
