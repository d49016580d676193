# SPDX-License-Identifier: Apache-2.0
"""Which ops of DeepSpeed a config needs, and the command that builds them."""

import json
import sys
from types import SimpleNamespace

import pytest
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder.builder import OpBuilder
from places import ROOT

from examples.gpt.config import TWINS
from zero8 import cli
from zero8.zero import ops

CONFIGS = {path.name: path for path in sorted((ROOT / "configs").glob("*.json"))}
SHARED, NVME = ["ShareMemCommBuilder"], ["PinMemoryBuilder", "AsyncIOBuilder"]
# What an engine loads on a GPU: with our optimizer, and with its fp32 twin in its place.
OURS_AND_TWIN = {
    "zero0.json": ([], ["FusedAdamBuilder"]),
    "zero1_bf16.json": ([], ["FusedAdamBuilder"]),
    "zero2_bf16.json": ([], ["FusedAdamBuilder"]),
    "zero2_bf16_masters_offload.json": ([], ["CPUAdamBuilder"]),
    "zero2_bf16_offload.json": ([], ["CPUAdamBuilder"]),
    "zero2_offload.json": ([], ["CPUAdamBuilder"]),
    "zero2_offload_lion.json": ([], ["CPULionBuilder"]),
    "zero2_offload_muon.json": ([], ["CPUAdamBuilder"]),
    "zero2_offload_sgd.json": ([], []),
    "zero3_bf16_masters_offload.json": ([], ["CPUAdamBuilder"]),
    "zero3_bf16_offload.json": ([], ["CPUAdamBuilder"]),
    "zero3_nvme.json": (NVME, ["CPUAdamBuilder", *NVME]),
}


def test_needed_is_known_for_every_config():
    assert sorted(OURS_AND_TWIN) == sorted(CONFIGS)


@pytest.mark.parametrize("name", CONFIGS)
def test_needed_of_a_config_with_ours_and_with_its_twin(name):
    config = json.loads(CONFIGS[name].read_text())
    ours, twin = OURS_AND_TWIN[name]
    assert ops.needed(config, "cuda") == ours
    assert ops.needed(config, "cpu") == SHARED + ours
    config["optimizer"]["type"] = TWINS[config["optimizer"]["type"]]
    assert ops.needed(config, "cuda") == twin
    assert ops.needed(config, "cpu") == SHARED + twin


@pytest.mark.parametrize(
    ("optimizer", "resident", "offloaded"),
    [
        (None, [], []),
        ({}, [], []),
        ({"type": "SGD"}, [], []),
        ({"type": "Adam"}, ["FusedAdamBuilder"], ["CPUAdamBuilder"]),
        ({"type": "adamw", "params": None}, ["FusedAdamBuilder"], ["CPUAdamBuilder"]),
        ({"type": "AdamW", "params": {"torch_adam": True}}, [], []),
        (
            {"type": "AdamW", "params": {"torch_adam": False}},
            ["FusedAdamBuilder"],
            ["CPUAdamBuilder"],
        ),
        ({"type": "Muon"}, ["FusedAdamBuilder"], ["CPUAdamBuilder"]),
        ({"type": "Lion"}, ["FusedLionBuilder"], ["CPULionBuilder"]),
        ({"type": "Adagrad"}, [], ["CPUAdagradBuilder"]),
        ({"type": "Lamb"}, ["FusedLambBuilder"], ["FusedLambBuilder"]),
    ],
)
def test_needed_of_each_optimizer_of_deepspeed(optimizer, resident, offloaded):
    for zero, expected in (
        ({}, resident),
        ({"offload_optimizer": None}, resident),
        ({"offload_optimizer": {"device": "none"}}, resident),
        ({"offload_optimizer": {"device": "cpu"}}, offloaded),
        ({"offload_optimizer": {"device": "nvme"}}, offloaded + NVME),
        ({"offload_param": {"device": "nvme"}}, resident + NVME),
        ({"offload_param": {"device": "cpu"}}, resident),
    ):
        config = {"optimizer": optimizer, "zero_optimization": zero}
        assert ops.needed(config, "cuda") == expected


def test_needed_names_builders_that_deepspeed_has():
    """Guards the tables: an unknown name would get a builder that cannot build."""
    for name in [*SHARED, *NVME, "CPUAdamBuilder", "FusedAdamBuilder", "CPULionBuilder"]:
        assert get_accelerator().get_op_builder(name).__name__ == name


@pytest.fixture
def built(monkeypatch):
    """The ops that DeepSpeed was asked for, none of which is compiled; libaio is there."""
    asked = []

    def load(self, verbose):
        asked.append(self.name)
        return SimpleNamespace(__file__=f"/cache/{self.name}.so")

    monkeypatch.setattr(OpBuilder, "load", load)
    monkeypatch.setattr("deepspeed.ops.op_builder.AsyncIOBuilder.load", load)
    monkeypatch.setattr("deepspeed.ops.op_builder.PinMemoryBuilder.load", load)
    monkeypatch.setattr(ops, "missing_for_nvme", lambda: None)
    return asked


def test_build_of_a_config_prints_our_op_and_those_of_deepspeed(built, capsys):
    assert cli.main(["build", str(CONFIGS["zero3_nvme.json"]), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["path"].endswith(".so")
    assert built == ["deepspeed_shm_comm", "pin_memory", "async_io"]
    assert [op["op"] for op in result["deepspeed"]] == built
    assert result["deepspeed"][2]["path"] == "/cache/async_io.so"
    assert all(op["seconds"] >= 0 for op in result["deepspeed"])


def test_build_of_a_config_prints_a_line_with_seconds_for_each_op(built, capsys):
    assert cli.main(["build", str(CONFIGS["zero2_offload.json"])]) == 0
    ours, shared = capsys.readouterr().out.splitlines()
    assert "/zero8_adam_" in ours
    assert shared == "/cache/deepspeed_shm_comm.so (0.0 s)"


def test_build_without_a_config_does_not_ask_deepspeed(built, capsys):
    assert cli.main(["build", "--json"]) == 0
    assert built == []
    assert "deepspeed" not in json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_build_of_what_is_no_config_says_what_is_expected(built, tmp_path, text):
    path = tmp_path / "config.json"
    if text:
        path.write_text(text)
    with pytest.raises(SystemExit, match=f"got {path}, expected DeepSpeed's JSON config: "):
        cli.main(["build", str(path)])
    assert built == []


def test_build_of_a_config_without_deepspeed_says_what_to_install(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "zero8.zero.ops")
    monkeypatch.delattr("zero8.zero.ops")
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(SystemExit, match="2"):
        cli.main(["build", str(CONFIGS["zero2_offload.json"])])
    assert "needs deepspeed: pip install 'zero8[deepspeed]'" in capsys.readouterr().err


def test_build_of_nvme_without_libaio_says_what_to_install_and_builds_nothing(built, monkeypatch):
    monkeypatch.setattr(ops, "missing_for_nvme", lambda: "apt-get install libaio-dev")
    monkeypatch.setattr("zero8.op.build.op", lambda: pytest.exit("built without libaio"))
    with pytest.raises(SystemExit, match="apt-get install libaio-dev"):
        cli.main(["build", str(CONFIGS["zero3_nvme.json"])])
    assert built == []
