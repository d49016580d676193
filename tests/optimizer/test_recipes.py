# SPDX-License-Identifier: Apache-2.0
"""Every config in configs/ runs as its README says, and holds the bytes that stand there.

To run one: `pytest tests/optimizer/test_recipes.py -m "" -k zero3_nvme`.
"""

import json
import re

import pytest
from needs import need_nvme
from places import ROOT
from ranks import build_ops
from recipe_worker import steps_of
from train_worker import row as measured_row

from examples.gpt.engines import TWINS, build, load_config
from examples.gpt.model import GPTConfig

# A first run also builds DeepSpeed's ops.
pytestmark = pytest.mark.timeout(1800)

RANKS, STEPS = 2, 3
README = (ROOT / "configs" / "README.md").read_text()
FILES = sorted(
    path.name for path in (ROOT / "configs").iterdir() if path.suffix in (".json", ".toml")
)
OF_DEEPSPEED = [name for name in FILES if name.endswith(".json")]
ROW = re.compile(
    r"^\| `(?P<file>\w+\.(json|toml))` \| (?P<shows>[^|]+) "
    r"\| `(ENGINE=(?P<engine>\w+) )?(OPTIMIZER=(?P<optimizer>\w+) )?CONFIG=(?P<config>\S+) "
    r"launch/local.sh` "
    r"\| (?P<own>[0-9.]+) \((?P<all>[0-9.]+)\) \| (?P<fp32>[0-9.]+) \|$",
    re.MULTILINE,
)
ROWS = {row["file"]: row.groupdict() for row in ROW.finditer(README)}


def test_readme_has_a_row_for_each_recipe():
    assert sorted(ROWS) == FILES
    for name in FILES:
        assert ROWS[name]["config"] == f"configs/{name}"


def ready(path, folder):
    """Build what a DeepSpeed recipe needs; return its content, and a file to launch it by."""
    config = json.loads(path.read_text())
    build_ops()
    offload = config.get("zero_optimization", {}).get("offload_optimizer", {})
    if offload.get("device") == "nvme":
        need_nvme()
        offload["nvme_path"] = str(folder / "swap")
    (folder / path.name).write_text(json.dumps(config))
    return config, folder / path.name


@pytest.mark.parametrize(
    "name",
    [
        # That of NVMe may compile DeepSpeed's aio first, which takes minutes.
        pytest.param(name, marks=pytest.mark.slow) if "nvme" in name else name
        for name in OF_DEEPSPEED
    ],
)
def test_recipe_steps_under_plain_deepspeed_as_it_stands(tmp_path, standing_ranks, name):
    path = ROOT / "configs" / name
    ready(path, tmp_path)
    # One process for all recipes: starting one takes longer than its steps.
    (got,) = standing_ranks(1).run(steps_of, path=str(path), folder=str(tmp_path))
    assert all(got["moved"])
    assert got["losses"][1] == got["losses"][2] > got["losses"][3] > 0
    assert got["state bytes"] < 2.1
    assert got["schedule"] == 400
    assert bool(got["swapped"]) == (name == "zero3_nvme.json")


# As launch/local.sh does; test_train_local.py runs the script itself.
@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_recipe_trains_both_optimizers_with_the_state_bytes_of_its_row(
    tmp_path, standing_ranks, name
):
    path, row = with_micro_batches_of_one(ROOT / "configs" / name, tmp_path), ROWS[name]
    is_sharded = True
    if path.suffix == ".json":
        config, path = ready(path, tmp_path)
        is_sharded = bool(config.get("zero_optimization"))
    runs, eight_bit = {}, row["optimizer"] or "Adam8bitBlockwise"
    for optimizer in (TWINS[eight_bit], eight_bit):
        if path.suffix == ".json":
            build(load_config(path, optimizer))  # not within the ranks' time limit
        runs[optimizer], _ = standing_ranks(RANKS).run(
            measured_row,
            engine=row["engine"] or "deepspeed",
            optimizer=optimizer,
            steps=STEPS,
            model=GPTConfig(),
            config=str(path),
            out=str(tmp_path / optimizer),
        )
    fp32, quantized = runs.values()
    assert f"{fp32['state_bytes_per_param']:.3f}" == row["fp32"]
    assert f"{quantized['state_bytes_per_param']:.3f}" == row["own"]
    assert f"{quantized['state_bytes'] / quantized['state_numel']:.3f}" == row["all"]
    # Without ZeRO every rank holds the states of all.
    copies = 1 if is_sharded else RANKS
    assert fp32["state_numel"] == quantized["state_numel"] == copies * quantized["parameters"]
    # The same model after three small updates, most of which AdamW's bfloat16 weights round away.
    assert quantized["val_loss"] == pytest.approx(fp32["val_loss"], rel=1e-2)
    if name == "zero3_nvme.json":
        for rank in range(RANKS):
            assert list((tmp_path / "swap").rglob(f"rank{rank}/zero8-*"))


def with_micro_batches_of_one(path, folder):
    """Write a recipe with one window per step: processors may be slow in bfloat16."""
    text, count = re.subn(r"(micro_batch_size\w*\W+)8\b", r"\g<1>1", path.read_text())
    assert count == 1
    (folder / path.name).write_text(text)
    return folder / path.name
