# SPDX-License-Identifier: Apache-2.0
"""`Adam8bitShared` of sharded parameters: which cuts it takes, and where its states go.

The steps and checkpoints are those of tests/fsdp/test_fsdp_step.py and the like, under "shared".
"""

import copy

import fsdp_placements as ranks
import pytest
import torch
from checkpoint_command import called
from fsdp_checkpoints import load, save
from fsdp_placements import CUT_STEPS, REFUSED_BANDS, Case
from fsdp_worker import BANDS, LAYOUTS, differing, optimizer_of, results, run, sharded, start
from nests import assert_same
from ranks import error_of
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.tensor import Shard, distribute_tensor

from zero8 import Adam8bitShared

pytestmark = pytest.mark.usefixtures("one_torch_thread")
SHAPES = ((127, 301), (15, 8, 70))
SHARED = Case((Shard(0),), SHAPES, made=Adam8bitShared)
BLOCKWISE = Case((Shard(0),), SHAPES)
CUT = Case((Shard(0),), ((96, 300),), (3,))
"""Blocks are kept and bands cut, of all ranks but the last."""


# --- Cuts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REFUSED_BANDS)
def test_cut_inside_of_a_band_is_refused_on_all_ranks_and_changes_nothing(name, standing_ranks):
    """The message names the parameter, its shape and what to do, of which the first works."""
    case = REFUSED_BANDS[name]
    (shape,), (num_ranks,) = case.shapes, case.mesh
    expected = ranks.refused_alone(name)
    for got in standing_ranks(num_ranks).run(ranks.refused, name=name):
        kind, message = got["error"]
        assert kind == "ValueError" and got["later"] == got["error"]
        assert message.startswith(f"bad: got shape {shape} sharded as {case.placements}, which cut")
        assert f"first dimension alone, at multiples of {CUT_STEPS.get(name, 64)};" in message
        assert "fp32_params=['bad'], or use Adam8bitBlockwise" in message
        assert got["same"] and got["states"] == 0
        assert_same(got["then"], expected)


# --- States of one optimizer in another -----------------------------------------------------------


def trained(case: Case, form: str = "8bit") -> dict:
    """Return what one process has after a step: values, and the optimizer's state dict."""
    params, optimizer = ranks.make(case, ranks.values_of(case), state_dict_format=form)
    ranks.run(case, None, params, optimizer, 0, 1)
    return {"values": [p.detach() for p in params], "optimizer": optimizer.state_dict()}


def resumed_alone(case: Case, saved: dict) -> list[dict]:
    """Load what `trained` returns in one process, and take a step; return `results`."""
    params, optimizer = ranks.make(case, [value.clone() for value in saved["values"]])
    optimizer.load_state_dict(saved["optimizer"])
    ranks.run(case, None, params, optimizer, 1, 2)
    return ranks.results(params, optimizer)


def placed(saved: dict, case: Case, mesh) -> dict:
    """Return a state dict whose tensors are sharded as parameters are."""
    found = copy.deepcopy(saved)
    for state in found["state"].values():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.ndim > 1:
                state[key] = distribute_tensor(value, mesh, case.placements)
    return found


def resumed(case: Case, saved: dict, is_placed: bool) -> dict:
    """Load the same on ranks, with whole tensors or sharded ones, and take a step.

    Returns:
        error: of the load, where there is one, and then states: how many there are.  Else
        results: see `ranks.results`.
    """
    start()
    mesh = torch.distributed.init_device_mesh("cpu", case.mesh)
    values = [distribute_tensor(value, mesh, case.placements) for value in saved["values"]]
    params, optimizer = ranks.make(case, values)
    packed = placed(saved["optimizer"], case, mesh) if is_placed else saved["optimizer"]
    if error := error_of(optimizer.load_state_dict, packed):
        return {"error": error, "states": len(optimizer.state)}
    ranks.run(case, mesh, params, optimizer, 1, 2)
    return {"results": ranks.results(params, optimizer)}


either_way = pytest.mark.parametrize("is_placed", [False, True], ids=["whole", "sharded"])


@either_way
@pytest.mark.parametrize("form", ["8bit", "fp32"])
@pytest.mark.parametrize(
    ("first", "second"), [(SHARED, BLOCKWISE), (BLOCKWISE, SHARED)], ids=["from", "to"]
)
def test_shared_states_on_ranks_are_encoded_anew_with_the_bits_of_one_process(
    first, second, form, is_placed, standing_ranks
):
    saved = trained(first, form)
    expected = resumed_alone(second, saved)
    for got in standing_ranks(2).run(resumed, case=second, saved=saved, is_placed=is_placed):
        assert_same(got["results"], expected)


@either_way
def test_shared_state_is_refused_on_all_ranks_by_parameters_whose_cuts_are_inside_of_bands(
    is_placed, standing_ranks
):
    case = Case(CUT.placements, CUT.shapes, made=Adam8bitShared)
    every = standing_ranks(3).run(resumed, case=CUT, saved=trained(case), is_placed=is_placed)
    for got in every:
        kind, message = got["error"]
        assert kind == "ValueError" and got["states"] == 0
        assert message.startswith(
            "state of w0: got one of Adam8bitShared for parts of shape (96, 300) that cut its bands"
        )
        assert "convert IN OUT --to fp32" in message


@either_way
def test_shared_state_in_fp32_loads_into_parameters_whose_cuts_are_inside_of_bands(
    is_placed, standing_ranks
):
    saved = trained(Case(CUT.placements, CUT.shapes, made=Adam8bitShared), "fp32")
    expected = resumed_alone(CUT, saved)
    for got in standing_ranks(3).run(resumed, case=CUT, saved=saved, is_placed=is_placed):
        assert_same(got["results"], expected)


# --- zero8 checkpoint -----------------------------------------------------------------------------


def save_two(folder) -> tuple[dict, dict]:
    """Write checkpoints of two modes; return `results` then, and after a step more."""
    start()
    model = sharded(LAYOUTS["shared_offload"])
    optimizer = optimizer_of(model, LAYOUTS["shared_offload"])
    run(model, optimizer, 0, 2)
    for mode in ("sharded", "flattened"):
        save(model, optimizer, mode, folder)
    before = results(model, optimizer)
    run(model, optimizer, 2, 3)
    return before, results(model, optimizer)


def load_sharded(folder) -> tuple[dict, dict]:
    """Return the same of a run that loads a checkpoint, `folder / "sharded"`."""
    start()
    model = sharded(LAYOUTS["shared_offload"])
    optimizer = optimizer_of(model, LAYOUTS["shared_offload"])
    load(model, optimizer, "sharded", folder)
    before = results(model, optimizer)
    run(model, optimizer, 2, 3)
    return before, results(model, optimizer)


@pytest.fixture(scope="module")
def saved(standing_ranks, tmp_path_factory):
    """The folder of the checkpoints of `save_two` on three ranks, one without a whole expert."""
    folder = tmp_path_factory.mktemp("shared")
    return folder, standing_ranks(3).run(save_two, folder=folder)[0]


@pytest.mark.parametrize("mode", ["sharded", "flattened"])
def test_shared_checkpoint_of_ranks_is_whole_and_inspected_with_its_codes(mode, saved, capsys):
    assert called(capsys, "verify", saved[0] / mode)["whole"]
    report = called(capsys, "inspect", saved[0] / mode)
    params = {row["name"]: row for row in report["params"]}
    assert report["codecs"] == ["shared"]
    for name in ("bands", "rows_of_experts", "whole_experts", "one_row"):
        assert params[name]["codec"] == "shared"
        assert params[name]["shape"] == list(BANDS[name])
        assert params[name]["exp_avg_sq"]["codes"] > 2


def test_shared_checkpoint_of_ranks_is_converted_with_every_code(saved, capsys, tmp_path):
    folder, (expected, _) = saved
    called(capsys, "convert", folder / "sharded", tmp_path / "plain.pt", "--to", "plain")
    content = torch.load(tmp_path / "plain.pt")
    assert called(capsys, "diff", folder / "sharded", tmp_path / "plain.pt")["equal"]
    names = content["optimizer"]["param_groups"][0]["param_names"]
    found = {
        name: {"values": content["model"][name], **content["optimizer"]["state"][number]}
        for number, name in enumerate(names)
    }
    assert differing(found, expected) == []


def test_shared_checkpoint_of_ranks_becomes_adamws_with_the_decoded_moments(
    saved, capsys, tmp_path
):
    called(capsys, "convert", saved[0] / "sharded", tmp_path / "plain.pt", "--to", "plain")
    called(capsys, "convert", saved[0] / "sharded", tmp_path / "fp32.pt", "--to", "fp32")
    model = LAYOUTS["shared"].model()
    optimizer = optimizer_of(model, LAYOUTS["shared"], state_dict_format="fp32")
    optimizer.load_state_dict(torch.load(tmp_path / "plain.pt")["optimizer"])
    found = torch.load(tmp_path / "fp32.pt")["optimizer"]["state"]
    for number, state in optimizer.state_dict()["state"].items():
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(found[number][key], state[key])


def test_shared_checkpoint_of_one_process_is_converted_for_ranks_which_go_on_with_its_bits(
    saved, capsys, standing_ranks, tmp_path
):
    called(capsys, "convert", saved[0] / "flattened", tmp_path / "plain.pt", "--to", "plain")
    called(capsys, "convert", tmp_path / "plain.pt", tmp_path / "sharded", "--to", "dcp")
    assert called(capsys, "diff", saved[0] / "sharded", tmp_path / "sharded")["equal"]
    for got in standing_ranks(2).run(load_sharded, folder=tmp_path):
        for ours, theirs in zip(got, saved[1], strict=True):
            assert differing(ours, theirs, 2, 3) == []


def save_cut(saved: dict, folder) -> None:
    """Write what `trained` returns of one parameter, cut inside of its bands."""
    start()
    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    state = placed(saved["optimizer"], CUT, mesh)["state"][0]
    groups = [{"params": ["w0"], "param_names": ["w0"], "lr": 1.0}]
    content = {"optimizer": {"state": {"w0": state}, "param_groups": groups}}
    dcp.save(content, checkpoint_id=folder)


def test_shared_checkpoint_whose_chunks_cut_bands_is_reported_as_damaged(
    capsys, standing_ranks, tmp_path
):
    case = Case(CUT.placements, CUT.shapes, made=Adam8bitShared)
    standing_ranks(2).run(save_cut, saved=trained(case), folder=tmp_path / "cut")
    report = called(capsys, "verify", tmp_path / "cut", status=1)
    assert "for parts of shape (96, 300) that cut its bands" in report["problems"][0]
