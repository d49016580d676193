# SPDX-License-Identifier: Apache-2.0
"""What a conversion refuses: nothing is written then.  test_tools.py has more damages."""

import pytest
import torch
from convert_cases import converted, refusal
from convert_model import saved_plain
from small_optimizers import run

from zero8 import Adam8bitBlockwise, Lion8bitBlockwise
from zero8.checkpoint.commands import convert


def without_weights(content):
    del content["model"]


def with_another_step(content):
    content["optimizer"]["state"][0]["step"] += 1


def with_float32_moments(content):
    """As bitsandbytes' are, where its blocks are not ours: no template of DCP takes both."""
    step = torch.tensor(float(content["optimizer"]["state"][0]["step"]))
    moments = {name: torch.zeros(67, 96) for name in ("exp_avg", "exp_avg_sq")}
    content["optimizer"]["state"][0] = {"step": step, **moments}


def with_nan(content):
    content["optimizer"]["state"][1]["exp_avg_scale"][3] = torch.nan


@pytest.mark.parametrize(
    ("change", "targets", "message"),
    [
        (with_nan, convert.TARGETS, "lora_b"),
        (without_weights, ["zero"], "embed: got no weights"),
        (with_another_step, ["zero"], "embed 5"),
        (with_float32_moments, ["dcp"], "fp32 Adam's of embed"),
        (with_float32_moments, ["bitsandbytes"], "got moments of an fp32 Adam"),
    ],
)
def test_convert_of_what_a_target_cannot_hold_is_refused_for_it_alone(
    change, targets, message, tmp_path
):
    saved_plain(tmp_path / "in", codec="dynamic")
    content = torch.load(tmp_path / "in", weights_only=True)
    change(content)
    torch.save(content, tmp_path / "in")
    for to in targets:
        assert message in refusal(tmp_path / "in", tmp_path / "out", to)
    if "plain" not in targets:
        result = converted(tmp_path / "in", tmp_path / "out", "plain")
        assert any("no weights" in note for note in result["notes"]) == ("model" not in content)


def test_convert_does_not_touch_an_output_that_is_there(tmp_path):
    saved_plain(tmp_path / "in")
    (tmp_path / "out").write_text("mine")
    assert "exists" in refusal(tmp_path / "in", tmp_path / "out")
    assert (tmp_path / "out").read_text() == "mine"


def test_convert_into_a_folder_that_is_not_there_makes_it_and_prints_the_path_as_given(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    saved_plain(tmp_path / "in")
    assert converted("in", "new/folder/out.pt", "plain")["target"] == "new/folder/out.pt"
    assert torch.load("new/folder/out.pt")["optimizer"]["state"]


def test_convert_that_fails_while_writing_leaves_nothing(tmp_path, monkeypatch):
    saved_plain(tmp_path / "in")

    def fail(contents, path):
        path.write_text("half")
        raise OSError("no space left")

    monkeypatch.setitem(convert.TARGETS, "plain", (fail, ""))
    assert "no space" in refusal(tmp_path / "in", tmp_path / "out")


@pytest.mark.parametrize(
    ("has_adam", "to", "message"),
    [
        (False, "bitsandbytes", "of Lion8bitBlockwise, expected one of Adam8bitBlockwise"),
        (True, "plain", "states of several algorithms: lion of 0.weight, adam of 1.weight"),
    ],
)
def test_convert_of_other_algorithms_is_refused(has_adam, to, message, tmp_path):
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(2)))
    states = []
    for optimizer_class in (Lion8bitBlockwise, Adam8bitBlockwise):
        optimizer = optimizer_class(model.named_parameters(), min_8bit_size=1)
        run(optimizer, model.parameters(), 1)
        states.append(optimizer.state_dict())
    if has_adam:
        states[0]["state"][1] = states[1]["state"][1]
    torch.save({"model": model.state_dict(), "optimizer": states[0]}, tmp_path / "in")
    assert message in refusal(tmp_path / "in", tmp_path / "out", to)
