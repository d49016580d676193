# SPDX-License-Identifier: Apache-2.0
"""What README shows must run, and what it says of defaults must be so."""

import inspect
import json
import re
import sys

import pytest
import torch
from places import ROOT
from processes import run

import zero8
from zero8.checkpoint.files import tags
from zero8.optimizer import Adam8bitBlockwise

README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_readme_python_example_runs_and_prints_the_report(capsys):
    exec(blocks("python")[0], {})
    assert "8-bit: 131,072 elements" in capsys.readouterr().out


@pytest.mark.slow
def test_readme_fsdp2_example_prints_the_report_that_readme_shows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fsdp2.py").write_text(blocks("python")[1])
    ((words, printed),) = re.findall(r"\$ torchrun (.*)\n((?:.+\n)+?)```", README)
    done = run([sys.executable, "-m", "torch.distributed.run", *words.split()], OMP_NUM_THREADS="1")
    assert (done.returncode, done.stdout) == (0, printed), done.stderr


def test_readme_example_of_tags_makes_a_complete_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(blocks("python")[2], {})
    assert tags.read_latest(tmp_path / "runs" / "7b") == "step400"


def test_readme_tests_of_its_tables_are_there():
    names = re.findall(r"`(test_fsdp\w+)`", README)
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert names and not [name for name in names if f"def {name}(" not in sources]


def test_readme_json_example_is_a_config_of_our_optimizer():
    (example,) = blocks("json")
    section = json.loads(example)["optimizer"]
    optimizer_class = getattr(torch.optim, section["type"])
    assert optimizer_class is zero8.Adam8bitBlockwise
    optimizer_class([torch.nn.Parameter(torch.zeros(2, 2))], **section["params"])


def test_readme_table_of_settings_names_the_defaults():
    rows = re.findall(r"^\| `(\w+)` \| `?(.*?)`? \|", README, re.MULTILINE)
    parameters = inspect.signature(Adam8bitBlockwise.__init__).parameters
    assert len(rows) == 9
    for name, default in rows:
        expected = parameters[name].default
        assert json.loads(default) == (list(expected) if expected == () else expected), name


def test_readme_figure_is_there():
    for path in re.findall(r"!\[.*?\]\((.*?)\)", README):
        assert (ROOT / path).is_file()


def test_readme_bytes_of_the_demo_are_those_of_its_record():
    record = ROOT / "benchmarks" / "records" / "demo_cpu_202611.json"
    for row in json.loads(record.read_text())["runs"]:
        assert f"{row['state_bytes_per_param']:.3f}" in README
        assert f"{row['val_loss']:.4f}" in README
        assert f"{row['step_ms']:.2f}" in README
