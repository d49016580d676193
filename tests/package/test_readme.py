# SPDX-License-Identifier: Apache-2.0
"""What README shows must run."""

import json
import re

import pytest
from doc_blocks import reader, type_in
from doc_worker import bits_in_an_engine
from ranks import build_ops

from zero8.files import tags


@pytest.mark.shown("README.md", "torch.nn.Linear(256, 256))\noptimizer")
def test_readme_python_example_runs_and_prints_the_report(block, capsys):
    exec(block.text, {})
    assert "8-bit: 131,072 elements" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.shown("README.md", "fully_shard(model", "$ torchrun")
def test_readme_fsdp2_example_prints_the_report_that_readme_shows(blocks, tmp_path):
    script, shell = blocks
    (tmp_path / "fsdp2.py").write_text(script.text)
    ((command, shown),) = shell.session
    assert type_in(tmp_path, command) == shown


@pytest.mark.shown("README.md", "tagged.saving")
def test_readme_example_of_tags_makes_a_complete_one(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(block.text, {})
    assert tags.read_latest(tmp_path / "runs" / "7b") == "step400"


STEPS = 4
TRAIN = "python -m torch.distributed.run --standalone --nproc-per-node 2 -m examples.gpt"
DEMO = f"--optimizer Adam8bitBlockwise --config configs/zero2_offload.json --steps {STEPS}"
# What differs from run to run: a speed, the use of codes, and the bytes of what is packed.
MEASURED = re.compile(r"[\d.]+ GB/s|(?<=\b25)\d(?= of)|\b\d\.\d\d\b|\d\.\de-\d+|\d+ bytes|\.\.\.")


@pytest.mark.slow
@pytest.mark.shown("README.md", "$ zero8 checkpoint verify")
def test_readme_commands_of_checkpoints_print_what_readme_shows(block, tmp_path):
    """After the first steps of the run that `make train` does; but for what is measured."""
    build_ops()
    type_in(reader(tmp_path), f"DS_ACCELERATOR=cpu {TRAIN} {DEMO} --out runs/demo", seconds=240)
    for command, shown in block.session:
        shown = shown.replace("step400", f"step{STEPS}").replace("step 400", f"step {STEPS}")
        printed = type_in(tmp_path, command)
        if "..." in shown:
            before, _ = shown.split("...\n")
            printed = printed[: len(before)]
            shown = before
        assert MEASURED.sub("#", printed) == MEASURED.sub("#", shown)
    assert (tmp_path / "codes.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "other" / "latest_universal").read_text() == "universal"


@pytest.mark.shown("README.md", '"zero_optimization": {"stage": 2')
def test_readme_json_example_steps_in_an_engine(block, standing_ranks):
    for found in standing_ranks(2).run(bits_in_an_engine, ds_config=json.loads(block.text)):
        assert 8 in found.pop("bits")
        assert found == {"type": "Adam8bitBlockwise", "stage": 2, "offload": "cpu"}
