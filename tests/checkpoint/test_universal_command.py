# SPDX-License-Identifier: Apache-2.0
"""`zero8 checkpoint universal`: what it makes and refuses, and that nothing half-made stays."""

import argparse
import errno
import fcntl
import json
import os
import shutil
import sys
from collections import OrderedDict

import pytest
import torch
from deepspeed.checkpoint import ds_to_universal
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from processes import python
from universal_cuts import command
from universal_files import ENTRIES, SHAPES, change, values, write

STAGES = (2, 3)


def states_of(place):
    return sorted(place.glob("*_optim_states.pt"))


def empty_states(held):
    held["optimizer_state_dict"]["base_optimizer_state"]["state"].clear()


def make_sgd(held):
    for state in held["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
        state["momentum_buffer"] = state.pop("exp_avg")


def make_elastic(held):
    base = held["optimizer_state_dict"]["base_optimizer_state"]
    held["optimizer_state_dict"]["base_optimizer_state"] = list(base["state"].values())


def order_differently(held):
    held["ds_config"]["zero_optimization"]["round_robin_gradients"] = True
    held["param_shapes"][0].move_to_end("first")


SPOILED = {
    "saved without ZeRO": (
        lambda place: [path.unlink() for path in states_of(place)],
        "got no files *_optim_states.pt, expected a checkpoint",
    ),
    "no model states": (
        lambda place: [path.unlink() for path in place.glob("*_model_states.pt")],
        "got no files *_model_states.pt",
    ),
    "a rank missing": (
        lambda place: states_of(place)[1].unlink(),
        "got 1 files *_optim_states.pt, expected those of 2 ranks",
    ),
    "experts": (
        lambda place: torch.save({}, place / "layer_0_expert_0_mp_rank_00_model_states.pt"),
        "experts of DeepSpeed's MoE, which its converter leaves out",
    ),
    "a universal one": (lambda place: (place / "zero").mkdir(), "is a universal checkpoint"),
    "states on NVMe": (
        lambda place: (place / "offloaded_tensors").mkdir(),
        "are in swap files of NVMe",
    ),
    "before the first step": (
        lambda place: change(states_of(place)[0], empty_states),
        "saved before the first step",
    ),
    "of no Adam": (lambda place: change(states_of(place)[0], make_sgd), "without ['exp_avg']"),
    "elastic": (lambda place: change(states_of(place)[0], make_elastic), "elastic_checkpoint"),
    "round robin": (
        lambda place: change(place / "mp_rank_00_model_states.pt", order_differently),
        "would mix up parameters",
    ),
}


@pytest.mark.parametrize("spoiled", SPOILED)
def test_universal_command_refuses_what_cannot_be_converted(tmp_path, spoiled):
    spoil, reason = SPOILED[spoiled]
    place = write(tmp_path)
    spoil(place)
    status, result, text = command(tmp_path)
    assert status == 1
    assert reason in result["error"]
    assert str(place) in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "saved"]


def test_universal_command_refuses_folders_and_tags_that_are_not_there(tmp_path):
    place = write(tmp_path)
    for arguments, reason in (
        ((tmp_path / "nowhere",), "no such folder"),
        ((place,), f"this is a tag's own; give {tmp_path} --tag saved"),
        ((tmp_path, "--tag", "other"), "got tag 'other', expected one of ['saved']"),
    ):
        status, result, _ = command(*arguments)
        assert (status, reason in result["error"]) == (1, True), result
    (tmp_path / "latest").unlink()
    assert "name one of its tags by --tag: ['saved']" in command(tmp_path)[2]


@pytest.mark.parametrize("workers", ["0", "-1", "many"])
def test_universal_command_with_bad_usage_exits_with_2(tmp_path, workers, capsys):
    with pytest.raises(SystemExit) as caught:
        command(tmp_path, "--workers", workers)
    assert caught.value.code == 2
    assert "--workers" in capsys.readouterr().err


@pytest.mark.parametrize("stage", STAGES)
def test_universal_command_makes_a_folder_that_engines_of_all_stages_read(tmp_path, stage):
    """The files are those that DeepSpeed's loaders of stages 1 and 2, and of 3, look for."""
    write(tmp_path, stage)
    status, result, text = command(tmp_path)
    made = tmp_path / "saved_universal"
    assert status == 0, text
    assert json.loads(json.dumps(result)) == result
    assert (result["target"], result["zero_stage"], result["ranks"]) == (str(made), stage, 2)
    assert (result["parameters"], result["not_carried"]) == (2, [])
    assert '"checkpoint": {"load_universal": true}' in text
    assert (tmp_path / "latest_universal").read_text() == "saved_universal"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "latest",
        "latest_universal",
        "saved",
        "saved_universal",
    ]
    for name, shape in SHAPES.items():
        for entry in ENTRIES:
            held = torch.load(made / "zero" / name / f"{entry}.pt", weights_only=False)
            assert torch.equal(held["param"], values(entry, name).view(shape)), (name, entry)
        assert torch.load(made / "zero" / name / "step.pt") == 7
    common = torch.load(made / "zero" / "optimizer_state.pt", weights_only=False)
    assert common["optimizer_state_dict"]["state"] == {0: {"step": 7}}
    groups = [common["param_groups"], common["optimizer_state_dict"]["param_groups"]]
    assert groups == [[{"lr": 0.5, "params": [0]}]] * 2
    assert common["ds_version"] == "0.19.8"
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        assert torch.load(made / name, weights_only=False)["dp_world_size"] == 2


def test_universal_command_writes_to_another_folder(tmp_path):
    write(tmp_path / "from")
    status, result, _ = command(tmp_path / "from", "--out", tmp_path / "to" / "here")
    assert (status, result["target"]) == (0, str(tmp_path / "to" / "here"))
    assert (tmp_path / "to" / "latest_universal").read_text() == "here"
    assert sorted(path.name for path in (tmp_path / "from").iterdir()) == ["latest", "saved"]


def test_universal_command_says_what_universal_checkpoints_do_not_carry(tmp_path):
    def correct(held):
        (state,) = held["optimizer_state_dict"]["base_optimizer_state"]["state"].values()
        state["param_correction"] = torch.zeros(11, dtype=torch.int8)

    change(states_of(write(tmp_path))[0], correct)
    status, result, text = command(tmp_path)
    assert (status, result["not_carried"]) == (0, ["param_correction"])
    assert "not carried over: param_correction" in text


def test_universal_command_copies_the_objects_of_a_model_state_file(tmp_path):
    """DeepSpeed reads them from copies, which zero8 has made of what it read as data."""
    scaler = DynamicLossScaler(
        init_scale=2**16,
        scale_window=1000,
        min_scale=1.0,
        delayed_shift=2,
        consecutive_hysteresis=True,
    )
    objects = {
        "set": {1, "a"},
        "empty set": set(),
        "frozenset": frozenset({2, "b"}),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "device of a GPU": torch.device("cuda", 1),
        "namespace": argparse.Namespace(lr=0.1, betas=[0.9, 0.95]),
        "ordered": OrderedDict(b=1, a=2),
        "size": torch.Size([3, 4]),
        "stage": ZeroStageEnum.gradients,
    }
    held = {**objects, "scaler": scaler, "tensor": torch.arange(3.0)}
    name = "mp_rank_00_model_states.pt"
    change(write(tmp_path) / name, lambda model: model.update(client_state=held))
    status, _, text = command(tmp_path)
    assert status == 0, text
    copied = torch.load(tmp_path / "saved_universal" / name, weights_only=False)["client_state"]
    assert {key: (type(copied[key]), copied[key]) for key in objects} == {
        key: (type(value), value) for key, value in objects.items()
    }
    assert list(copied["ordered"]) == ["b", "a"]
    assert type(copied["scaler"]) is DynamicLossScaler
    assert vars(copied["scaler"]) == vars(scaler)
    assert torch.equal(copied["tensor"], held["tensor"])


class ByName:
    """Is pickled as an attribute of something, as Python 3.11.0 to 3.11.3 do it for enums."""

    def __init__(self, owner: object, name: str):
        self.reduced = getattr, (owner, name)

    def __reduce__(self):
        return self.reduced


def test_universal_command_copies_a_stage_that_was_pickled_by_name(tmp_path):
    name = "mp_rank_00_model_states.pt"
    stage = ByName(ZeroStageEnum, "gradients")
    change(write(tmp_path) / name, lambda model: model.update(client_state=stage))
    status, _, text = command(tmp_path)
    assert status == 0, text
    copied = torch.load(tmp_path / "saved_universal" / name, weights_only=False)["client_state"]
    assert copied is ZeroStageEnum.gradients


@pytest.mark.parametrize(
    ("planted", "message"),
    [
        pytest.param(ByName(ZeroStageEnum, "mro"), "got an attribute", id="no stage"),
        pytest.param(ByName(ZeroStageEnum, ["mro"]), "got an attribute", id="no name"),
        pytest.param(ByName(ZeroStageEnum.gradients, "name"), "got an attribute", id="no class"),
        pytest.param(ByName(torch.device, "type"), "an object of torch.device", id="other class"),
    ],
)
def test_universal_command_refuses_other_attributes(tmp_path, planted, message):
    name = "mp_rank_00_model_states.pt"
    change(write(tmp_path) / name, lambda model: model.update(client_state=planted))
    status, result, _ = command(tmp_path)
    assert status == 1 and not (tmp_path / "saved_universal").exists()
    assert message in result["error"]


def test_universal_command_does_not_write_over_a_folder(tmp_path):
    write(tmp_path)
    (tmp_path / "saved_universal").mkdir()
    status, result, _ = command(tmp_path)
    assert (status, "exists; remove it" in result["error"]) == (1, True)


def test_universal_command_that_fails_or_is_interrupted_leaves_nothing(tmp_path, monkeypatch):
    """The folder of before stays, and latest_universal names it."""
    write(tmp_path, tag="old")
    assert command(tmp_path)[0] == 0
    write_and_raise = {}

    def main(options):
        original(options)
        raise write_and_raise["error"]

    original = ds_to_universal.main
    monkeypatch.setattr(ds_to_universal, "main", main)
    shutil.copytree(tmp_path / "old", tmp_path / "new")
    write_and_raise["error"] = AssertionError("the reason")
    status, result, _ = command(tmp_path, "--tag", "new")
    assert (status, "DeepSpeed's converter failed" in result["error"]) == (1, True)
    assert "the reason" in result["error"]
    write_and_raise["error"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        command(tmp_path, "--tag", "new")
    assert (tmp_path / "latest_universal").read_text() == "old_universal"
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"latest", "latest_universal", "old", "old_universal", "new"}


def test_universal_command_clears_away_what_a_killed_one_left(tmp_path):
    write(tmp_path)
    left = tmp_path / ".saved_universal.unfinished"
    (left / "saved_universal" / "zero" / "other").mkdir(parents=True)
    for name in ("lock", "latest_universal"):
        (left / name).touch()
    assert command(tmp_path)[0] == 0
    assert not left.exists()
    assert not (tmp_path / "saved_universal" / "zero" / "other").exists()


def test_universal_command_is_refused_while_another_makes_the_same(tmp_path):
    write(tmp_path)
    work = tmp_path / ".saved_universal.unfinished" / "file"
    work.parent.mkdir()
    work.touch()
    with open(work.with_name("lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        status, result, _ = command(tmp_path)
    assert (status, "another process is making" in result["error"]) == (1, True)
    assert work.exists()


def test_universal_command_on_a_file_system_without_locks_runs(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    write(tmp_path)
    monkeypatch.setattr("fcntl.flock", fail)
    assert command(tmp_path)[0] == 0


def test_universal_command_without_deepspeed_says_what_to_install(tmp_path, monkeypatch):
    write(tmp_path)
    monkeypatch.setitem(sys.modules, "deepspeed.checkpoint", None)
    status, result, _ = command(tmp_path)
    assert (status, "pip install 'zero8[deepspeed]'" in result["error"]) == (1, True)


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_universal_command_with_several_workers_makes_the_same(tmp_path, stage):
    code = (
        "import argparse; from zero8.checkpoint.commands import universal; "
        "parser = argparse.ArgumentParser(); universal.add_arguments(parser); "
        f"print(universal.run(parser.parse_args([{str(tmp_path)!r}, '--workers', '3'])))"
    )
    write(tmp_path, stage)
    done = python(code, DS_ACCELERATOR="cpu")
    assert done.returncode == 0, done.stderr
    (tmp_path / "saved_universal").rename(tmp_path / "by several")
    assert command(tmp_path)[0] == 0
    pairs = [(tmp_path / name / "zero").rglob("*.pt") for name in ("by several", "saved_universal")]
    for ours, theirs in zip(*map(sorted, pairs), strict=True):
        held = [torch.load(path, weights_only=False) for path in (ours, theirs)]
        assert ours.name == theirs.name
        if ours.name in ("fp32.pt", "exp_avg.pt", "exp_avg_sq.pt"):
            assert torch.equal(held[0]["param"], held[1]["param"])
        else:
            assert held[0] == held[1]
