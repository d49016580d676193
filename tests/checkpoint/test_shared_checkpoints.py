# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of `Adam8bitShared` in the tools: inspected, compared, converted and read back."""

import pytest
import torch
from checkpoint_command import called
from torch import nn

import zero8

SHAPES = {
    "bands": (130, 300),
    "heads": (40, 4, 5, 30),
    "experts": (5, 70, 80),
    "row": (1, 5000),
    "lora": (2000, 8),
    "bias": (100,),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A file of a model and an optimizer of all shapes."""
    torch.manual_seed(0)
    params = {name: nn.Parameter(torch.randn(shape)) for name, shape in SHAPES.items()}
    adamw = torch.optim.AdamW(list(params.items()), lr=1e-3)
    for p in params.values():
        p.grad = torch.randn_like(p)
    adamw.step()
    optimizer = zero8.Adam8bitShared(list(params.items()), lr=1e-3)
    optimizer.load_state_dict(adamw.state_dict())
    path = tmp_path_factory.mktemp("shared") / "saved.pt"
    model = {name: p.detach() for name, p in params.items()}
    torch.save({"model": model, "optimizer": optimizer.state_dict()}, path)
    optimizer.state_dict_format = "fp32"
    return path, optimizer.state_dict()


def test_shared_checkpoint_is_inspected_with_its_codes(saved, capsys):
    report = called(capsys, "inspect", saved[0])
    assert report["codecs"] == ["shared"]
    params = {row["name"]: row for row in report["params"]}
    bands = params["bands"]
    assert bands["codec"] == "shared" and bands["bits"] == (8 + 1 / 8) / 2
    v = bands["exp_avg_sq"]
    assert v["codes"] == 256 and 0 < v["at_top"] < 1 and v["zeros"] == 0
    assert params["lora"]["bits"] == 32


def test_shared_checkpoint_through_a_dcp_folder_comes_back_equal(saved, tmp_path, capsys):
    folder, back = tmp_path / "dcp", tmp_path / "back.pt"
    called(capsys, "convert", saved[0], folder, "--to", "dcp")
    called(capsys, "convert", folder, back, "--to", "plain")
    for other in (folder, back):
        assert called(capsys, "diff", saved[0], other)["equal"]
    ours, theirs = (torch.load(path)["optimizer"]["state"] for path in (saved[0], back))
    for number, state in ours.items():
        assert set(state) == set(theirs[number])
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, theirs[number][key]), key


def test_shared_checkpoint_becomes_adamws_with_the_decoded_moments(saved, tmp_path, capsys):
    path, expected = saved
    called(capsys, "convert", path, tmp_path / "fp32.pt", "--to", "fp32")
    found = torch.load(tmp_path / "fp32.pt")["optimizer"]
    for number, state in expected["state"].items():
        for which in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(found["state"][number][which], state[which])


def test_difference_in_one_shared_code_is_counted_for_all_its_elements(saved, tmp_path, capsys):
    content = torch.load(saved[0])
    codes = content["optimizer"]["state"][0]["exp_avg_sq_q8_tiles"]
    codes[0, 0, 0] -= 1  # the first column of the first 64 rows
    torch.save(content, tmp_path / "other.pt")
    report = called(capsys, "diff", saved[0], tmp_path / "other.pt", status=1)
    assert report["different"] == [
        {"name": "bands", "exp_avg_sq": "64 of 39000 elements by up to 1 code(s)"}
    ]
