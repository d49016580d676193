# SPDX-License-Identifier: Apache-2.0
"""Conversions of what is not our own 8-bit state with names: AdamW, bitsandbytes, numbers."""

import pytest
import torch
from convert_cases import converted, refusal, same
from convert_model import saved_plain, unnamed_groups
from fsdp_checkpoints import content_of
from small_optimizers import run, small_model
from torch.distributed import checkpoint as dcp

import zero8
from zero8 import Adam8bitBlockwise, Lion8bitBlockwise, SGD8bitBlockwise
from zero8.files import scratch

SGD = {"lr": 0.01, "momentum": 0.9, "nesterov": True}


def saved_with(made, path, **options):
    """Save a small model and its optimizer, of float32 and of 8-bit moments; return both."""
    model = small_model()
    optimizer = made(model.named_parameters(), **options)
    run(optimizer, list(model.parameters()), 3)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    return model, optimizer


def assert_same_states(ours, theirs):
    assert ours.keys() == theirs.keys()
    for key, entries in theirs.items():
        assert ours[key].keys() == entries.keys() and same(ours[key], entries, entries), key


def test_convert_through_mapped_files_has_the_same_bits(tmp_path, monkeypatch):
    """As it joins what is larger than `SMALL_BYTES`."""
    _, optimizer = saved_with(Adam8bitBlockwise, tmp_path / "in")
    monkeypatch.setattr(scratch, "SMALL_BYTES", 0)
    converted(tmp_path / "in", tmp_path / "out", "plain")
    made = torch.load(tmp_path / "out", weights_only=True)["optimizer"]
    assert_same_states(made["state"], optimizer.state_dict()["state"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


@pytest.mark.parametrize(
    ("made", "options"), [(Lion8bitBlockwise, {}), (SGD8bitBlockwise, SGD)], ids=["lion", "sgd"]
)
def test_convert_of_one_moment_keeps_its_codes_and_decodes_to_fp32(made, options, tmp_path):
    model, optimizer = saved_with(made, tmp_path / "in", **options)
    converted(tmp_path / "in", tmp_path / "folder", "dcp")
    converted(tmp_path / "folder", tmp_path / "back", "plain")
    back = torch.load(tmp_path / "back", weights_only=True)["optimizer"]
    assert_same_states(back["state"], optimizer.state_dict()["state"])
    converted(tmp_path / "in", tmp_path / "fp32", "fp32")
    fp32 = torch.load(tmp_path / "fp32", weights_only=True)["optimizer"]
    assert_same_states(fp32["state"], zero8.export(optimizer)["state"])
    if made is SGD8bitBlockwise:
        other = torch.optim.SGD(small_model().named_parameters(), **SGD)
        other.load_state_dict(fp32)
        run(other, other.param_groups[0]["params"], 1)


@pytest.mark.parametrize(
    ("made", "options"), [(torch.optim.AdamW, {}), (torch.optim.SGD, SGD)], ids=["adamw", "sgd"]
)
def test_convert_of_torchs_optimizer_keeps_its_float32_moments(made, options, tmp_path):
    """SGD's states do not say their step: they have taken one at least."""
    _, theirs = saved_with(made, tmp_path / "in", **options)
    for to in ("plain", "fp32"):
        converted(tmp_path / "in", tmp_path / to, to)
        state = torch.load(tmp_path / to, weights_only=True)["optimizer"]["state"]
        for number, entries in theirs.state_dict()["state"].items():
            assert state[number].keys() == {"step", *entries}
            assert same(state[number], {"step": 1.0} | entries, entries.keys() | {"step"})
    result = converted(tmp_path / "in", tmp_path / "dcp", "dcp")
    assert any("state_dict_format" in note for note in result["notes"])


def test_convert_of_parameters_without_names_is_for_plain_files(tmp_path):
    model, optimizer = saved_plain(tmp_path / "in", groups_of=unnamed_groups)
    converted(tmp_path / "in", tmp_path / "plain", "plain")
    content = torch.load(tmp_path / "plain", weights_only=True)
    assert "param_names" not in content["optimizer"]["param_groups"][0]
    other = Adam8bitBlockwise(unnamed_groups(model))
    other.load_state_dict(content["optimizer"])
    assert_same_states(other.state_dict()["state"], optimizer.state_dict()["state"])
    for to in ("dcp", "zero"):
        assert "named_parameters" in refusal(tmp_path / "in", tmp_path / to, to)


def test_convert_of_a_flattened_folder_is_that_of_a_nested_one(tmp_path):
    """`flatten_optimizer_state_dict` writes the groups' settings under each parameter's name."""
    model, optimizer = saved_plain(tmp_path / "plain")
    for name, flat in (("nested", False), ("flat", True)):
        content = content_of(model, optimizer, flatten_optimizer_state_dict=flat)
        content["optim"] = content.pop("optimizer")  # any name
        dcp.save(content, checkpoint_id=tmp_path / name, no_dist=True)
        converted(tmp_path / name, tmp_path / f"{name}-plain", "plain")
    nested, flat, plain = (
        torch.load(tmp_path / name, weights_only=True)["optimizer"]
        for name in ("nested-plain", "flat-plain", "plain")
    )
    assert nested["param_groups"] == plain["param_groups"] == flat["param_groups"]
    for number, entries in plain["state"].items():
        assert same(nested["state"][number], entries, entries)
        assert same(flat["state"][number], entries, entries)
