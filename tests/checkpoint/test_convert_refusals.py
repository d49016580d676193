# SPDX-License-Identifier: Apache-2.0
"""What a conversion refuses: nothing is written then."""

import shutil

import pytest
import torch
from convert_cases import STAGES, converted, refusal
from convert_model import saved_plain

from zero8 import Adam8bitBlockwise, Lion8bitBlockwise
from zero8.checkpoint.commands import convert


@pytest.fixture
def zero_copy(source_at, tmp_path):
    """Return a copy of a checkpoint of two ranks that a test may damage: the folder of its tag."""

    def of(stage):
        shutil.copytree(source_at(f"zero{stage}x2"), tmp_path / "in" / "checkpoint")
        (tag,) = (tmp_path / "in" / "checkpoint").glob("global_step*")
        return tag

    return of


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("rank", [0, 1])
def test_convert_without_a_ranks_file_is_refused(stage, rank, zero_copy, tmp_path):
    tag = zero_copy(stage)
    (path,) = tag.glob(f"*zero_pp_rank_{rank}_*optim_states.pt")
    path.unlink()
    error = refusal(tag, tmp_path / "in" / "out")
    assert str(tag) in error and ("in no file" in error or "no state of" in error)


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_convert_with_a_ranks_file_twice_is_refused(stage, zero_copy, tmp_path):
    tag = zero_copy(stage)
    (path,) = tag.glob("*zero_pp_rank_1_*optim_states.pt")
    shutil.copy(path, path.with_name(path.name.replace("rank_1_", "rank_2_")))
    error = refusal(tag, tmp_path / "in" / "out")
    assert "elements" in error and "again" in error and "_rank_" in error


@pytest.mark.slow
def test_convert_of_another_steps_file_is_refused(zero_copy, tmp_path):
    tag = zero_copy(2)
    (path,) = tag.glob("*zero_pp_rank_1_*optim_states.pt")
    content = torch.load(path, weights_only=False)
    for state in content["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
        state["step"] += 1
    torch.save(content, path)
    error = refusal(tag, tmp_path / "in" / "out")
    assert "4 in bf16_zero_pp_rank_0" in error and "5 in bf16_zero_pp_rank_1" in error


@pytest.mark.slow
def test_convert_of_dcp_without_a_file_is_refused(source_at, tmp_path):
    (tmp_path / "in").mkdir()
    shutil.copytree(source_at("dcpx2"), tmp_path / "in" / "checkpoint")
    (tmp_path / "in" / "checkpoint" / "__1_0.distcp").unlink()
    assert "__1_0.distcp" in refusal(tmp_path / "in" / "checkpoint", tmp_path / "in" / "out")


@pytest.mark.parametrize("to", convert.TARGETS)
def test_convert_of_damaged_values_is_refused_and_leaves_nothing(to, tmp_path):
    _, optimizer = saved_plain(tmp_path / "in", codec="dynamic")
    content = torch.load(tmp_path / "in", weights_only=True)
    content["optimizer"]["state"][1]["exp_avg_scale"][3] = torch.nan
    torch.save(content, tmp_path / "in")
    assert "lora_b" in refusal(tmp_path / "in", tmp_path / "out", to)


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


def test_convert_to_zero_without_weights_is_refused(tmp_path):
    saved_plain(tmp_path / "in")
    content = torch.load(tmp_path / "in", weights_only=True)
    torch.save(content["optimizer"], tmp_path / "states")
    assert "embed: got no weights" in refusal(tmp_path / "states", tmp_path / "out", "zero")
    result = converted(tmp_path / "states", tmp_path / "out", "plain")
    assert "no weights" in result["notes"][0]
    assert "model" not in torch.load(tmp_path / "out", weights_only=True)


def test_convert_to_zero_of_different_steps_is_refused(tmp_path):
    saved_plain(tmp_path / "in")
    content = torch.load(tmp_path / "in", weights_only=True)
    content["optimizer"]["state"][0]["step"] += 1
    torch.save(content, tmp_path / "in")
    error = refusal(tmp_path / "in", tmp_path / "out", "zero")
    assert "embed 5" in error and "4 steps" in error
    converted(tmp_path / "in", tmp_path / "out", "plain")


def test_convert_to_dcp_of_8_bit_and_float32_moments_together_is_refused(tmp_path):
    """As bitsandbytes' are, where its blocks are not ours: no template of DCP takes both."""
    saved_plain(tmp_path / "in")
    content = torch.load(tmp_path / "in", weights_only=True)
    state = content["optimizer"]["state"][0]
    zeros = torch.zeros(67, 96)
    content["optimizer"]["state"][0] = {
        "step": torch.tensor(float(state["step"])),
        "exp_avg": zeros,
        "exp_avg_sq": zeros,
    }
    torch.save(content, tmp_path / "in")
    assert "fp32 Adam's of embed" in refusal(tmp_path / "in", tmp_path / "out", "dcp")
    converted(tmp_path / "in", tmp_path / "out", "plain")


def saved_lion(path, states_of_adam=False):
    """Save two parameters and their Lion; perhaps the second one's state is Adam's."""
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(2)))
    states = {}
    for optimizer_class in (Lion8bitBlockwise, Adam8bitBlockwise):
        optimizer = optimizer_class(model.named_parameters(), min_8bit_size=1)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        states[optimizer_class] = optimizer.state_dict()
    saved = states[Lion8bitBlockwise]
    if states_of_adam:
        saved["state"][1] = states[Adam8bitBlockwise]["state"][1]
    torch.save({"model": model.state_dict(), "optimizer": saved}, path)


def test_convert_of_lion_to_an_adam_is_refused_and_leaves_nothing(tmp_path):
    saved_lion(tmp_path / "in")
    error = refusal(tmp_path / "in", tmp_path / "out", "bitsandbytes")
    assert "of Lion8bitBlockwise, expected" in error and "of Adam8bitBlockwise" in error


def test_convert_of_states_of_two_algorithms_is_refused(tmp_path):
    saved_lion(tmp_path / "in", states_of_adam=True)
    error = refusal(tmp_path / "in", tmp_path / "out", "plain")
    assert "states of several algorithms: lion of 0.weight, adam of 1.weight" in error
