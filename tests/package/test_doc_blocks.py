# SPDX-License-Identifier: Apache-2.0
"""Blocks of the docs, run as the pages show them; those that need other packages are elsewhere."""

import json
import shlex

import pytest
import torch
from doc_blocks import type_in
from small_checkpoints import plain_file
from zero_worker import Model, base_optimizer, make_engine, train

import zero8
from zero8 import cli
from zero8.checkpoint.commands.convert import convert
from zero8.files import tags


@pytest.mark.shown("docs/optimizers.md", "zero8.Muon8bitBlockwise")
@pytest.mark.shown("docs/reliability.md", 'float("inf")')
@pytest.mark.shown("docs/moving.md", "load_state_dict(zero8.export", "fp32_params=")
@pytest.mark.shown("docs/api/optimizer.md", "clip_grad_norm_", "steps.remove", "zero8.Lion")
@pytest.mark.shown("docs/api/optimizer.md", "zero8.SGD", "zero8.AdEMAMix", "zero8.Muon")
@pytest.mark.shown("docs/api/optimizer.md", "zero8.StableEmbedding", "report.rows")
@pytest.mark.shown("docs/api/integrations.md", "health(optimizer)")
@pytest.mark.shown("docs/api/specification.md", "codec_named")
def test_python_block_of_the_docs_runs(block, capsys):
    exec(block.text, {})
    printed = capsys.readouterr().out
    assert ("print" in block.text) == bool(printed)


@pytest.mark.shown("docs/optimizers.md", "SGD8bitBlockwise", '"type": "Muon8bitBlockwise"')
def test_optimizer_section_of_the_docs_makes_that_optimizer(block):
    section = json.loads(block.text)["optimizer"]
    p = torch.nn.Parameter(torch.ones(64, 64))
    made = getattr(torch.optim, section["type"])([("weight", p)], **section["params"])
    assert made.param_groups[0].items() >= section["params"].items()


@pytest.mark.shown("docs/moving.md", "zero8 checkpoint inspect bnb.pt")
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


# --- README ---


@pytest.mark.shown("README.md", "torch.nn.Linear(256, 256))\noptimizer")
def test_readme_python_example_runs_and_prints_the_report(block, capsys):
    exec(block.text, {})
    assert "8-bit: 131,072 elements" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.shown("README.md", "fully_shard(model", "2 fsdp2.py")
def test_readme_fsdp2_example_prints_the_report_that_readme_shows(blocks, tmp_path):
    script, shell = blocks
    (tmp_path / "fsdp2.py").write_text(script.text)
    ((command, shown),) = shell.session
    assert type_in(tmp_path, command) == shown


@pytest.mark.shown("docs/checkpoints.md", "tagged.saving")
def test_readme_example_of_tags_makes_a_complete_one(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(block.text, {})
    assert tags.read_latest(tmp_path / "runs" / "7b") == "step400"


def bits_in_an_engine(ds_config):
    """Take steps in an engine of a config without a batch size; return what it is."""
    engine = make_engine(ds_config | {"train_micro_batch_size_per_gpu": 4}, Model())
    train(engine, 2)
    zero8.assert_active(engine)
    optimizer = base_optimizer(engine)
    return {
        "type": type(optimizer).__name__,
        "bits": {row.bits for row in optimizer.memory_report().rows},
        "stage": engine.zero_optimization_stage(),
        "offload": str(engine.zero_offload_optimizer().device),
    }


@pytest.mark.shown("README.md", '"zero_optimization": {"stage": 2')
def test_readme_json_example_steps_in_an_engine(block, standing_ranks):
    for found in standing_ranks(2).run(bits_in_an_engine, ds_config=json.loads(block.text)):
        assert 8 in found.pop("bits")
        assert found == {"type": "Adam8bitBlockwise", "stage": 2, "offload": "cpu"}
