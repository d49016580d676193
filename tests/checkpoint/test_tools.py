# SPDX-License-Identifier: Apache-2.0
"""`zero8 checkpoint verify`, `inspect`, `diff`, `seal` and `prune` on checkpoints of every kind."""

import json
import math
import re
import shutil
from functools import partial

import pytest
import torch
from damages import edited
from fragments import fragments_in
from moment_samples import flipped_in
from places import GOLDEN
from small_checkpoints import SHAPES, STEPS, dcp_folder, plain_file, trained

from zero8.checkpoint.read.open import open_checkpoint
from zero8.cli import main
from zero8.deepspeed.moment_tensor import moment_of
from zero8.spec.adam import ADAM
from zero8.spec.codec import CODECS


def called(capsys, *argv, status=0):
    """Run a command with --json; return its JSON object."""
    capsys.readouterr()
    assert main(["checkpoint", *map(str, argv), "--json"]) == status
    return json.loads(capsys.readouterr().out)


KINDS = {"plain": plain_file, "dcp": dcp_folder}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A checkpoint of each kind, not to be changed."""
    folder = tmp_path_factory.mktemp("checkpoints")
    found = {kind: make(folder / kind) for kind, make in KINDS.items()}
    return {"zero": GOLDEN / "zero2_checkpoint", **found}


@pytest.fixture
def zero(tmp_path):
    """A checkpoint of ZeRO-2, to be changed."""
    return shutil.copytree(GOLDEN / "zero2_checkpoint", tmp_path / "zero")


def state_files(path):
    return open_checkpoint(path).files


# --- Reading -------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("kind", KINDS)
def test_fragments_decode_to_the_optimizers_moments(kind, codec, tmp_path):
    params, optimizer = trained(codec)
    found = {
        name: [torch.full((p.numel(),), math.nan) for _ in ADAM.moment_names]
        for name, p in params.items()
    }
    for fragment in fragments_in(KINDS[kind](tmp_path / kind, codec=codec)):
        assert fragment.step == STEPS and fragment.weights is not None
        here = slice(fragment.piece.first, fragment.piece.first + fragment.piece.numel)
        for target, store in zip(found[fragment.name], fragment.stores, strict=True):
            target[here] = store.read(0, fragment.piece.numel)
        weights = params[fragment.name].detach().view(-1)[here]
        assert torch.equal(fragment.weights.float(), weights)
    optimizer.state_dict_format = "fp32"
    for number, state in optimizer.state_dict()["state"].items():
        for which, got in zip(ADAM.moment_names, found[list(SHAPES)[number]], strict=True):
            assert torch.equal(got, state[which].view(-1))


# --- verify --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["zero", *KINDS])
def test_verify_of_a_whole_checkpoint_is_0(kind, made, capsys):
    result = called(capsys, "verify", made[kind], status=0)
    assert result["whole"] and not result["manifest"] and not result["problems"]


def test_verify_of_a_sealed_folder_finds_any_flipped_byte(zero, capsys):
    """Also in what the states do not show: the model's file, a hole between records."""
    tag = zero / "step3"
    assert called(capsys, "seal", tag, status=0)["files"] == 3
    assert called(capsys, "verify", zero, status=0)["manifest"]
    (tag / "other").write_text("from another job")
    for file in sorted(tag.glob("*.pt")):
        whole = file.read_bytes()
        for place in (0, len(whole) // 2, len(whole) - 1):
            file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            problems = called(capsys, "verify", zero, status=1)["problems"]
            assert f"{file.name} (written by rank 0): contents differ" in problems
            assert "other: not in the manifest" in problems
        file.write_bytes(whole)


def state_in(content):
    return content["optimizer_state_dict"]["base_optimizer_state"]["state"][0]


def changed(change):
    """Return what changes the state in a file by a function."""
    return edited(lambda content: change(state_in(content)))


def set_nan(state):
    moment = state["exp_avg"] = moment_of(state["exp_avg"])  # which is saved with its hash
    moment.store.scales[3] = math.nan


def flip_a_bit(file):
    """Nothing but the moment's hash shows it: the values are finite, and there is no manifest."""
    codes = state_in(torch.load(file, weights_only=False))["exp_avg_sq"]["codes"]
    file.write_bytes(flipped_in(file.read_bytes(), codes))


def copy_of_rank_0(file):
    shutil.copy(file.with_name(file.name.replace("rank_1", "rank_0")), file)


DAMAGES = {
    "a flipped bit": (flip_a_bit, "rank_1.*8-bit moment exp_avg_sq of "),
    "a scale of NaN": (changed(set_nan), "exp_avg of .*: got a scale that is not finite"),
    "another step": (
        changed(lambda state: state.update(step=4)),
        "different numbers of steps: 3 in .*rank_0.*, 4 in .*rank_1",
    ),
    "one moment alone": (changed(lambda state: state.pop("exp_avg_sq")), "expected all 8-bit"),
    "one moment twice": (
        changed(lambda state: state.update(exp_avg_sq=state["exp_avg"])),
        "of different elements",
    ),
    "missing": (lambda file: file.unlink(), "are in no file"),
    "of another rank": (copy_of_rank_0, "again"),
    "of something else": (partial(torch.save, {}), "not a file of ZeRO's states"),
}


@pytest.mark.parametrize(("change", "message"), DAMAGES.values(), ids=DAMAGES)
def test_verify_of_states_that_are_damaged_says_how(change, message, zero, capsys):
    change(state_files(zero)[1])
    problems = called(capsys, "verify", zero, status=1)["problems"]
    assert any(re.search(message, problem) for problem in problems), problems


# --- inspect -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_inspect_counts_what_the_optimizer_has(kind, made, capsys):
    result = called(capsys, "inspect", made[kind], status=0)
    assert result["kind"] == kind and result["steps"] == [STEPS] and result["codecs"] == ["log"]
    assert result["bytes"] == sum(file.stat().st_size for file in state_files(made[kind]))
    assert result["numel"] == sum(map(math.prod, SHAPES.values()))
    assert result["numel_8bit"] == result["numel"] - 300
    params, optimizer = trained()
    state = optimizer.state[params["wide"]]
    (wide,) = (param for param in result["params"] if param["name"] == "wide")
    assert wide["shape"] == [40, 300] and wide["numel"] == 12000 and wide["bits"] == 8
    codes = state["exp_avg_q8"]
    assert wide["exp_avg"]["zeros"] == (codes == 0).sum() / 12000
    top = (codes == 127) | (codes == 129)
    assert wide["exp_avg"]["at_top"] == pytest.approx(float(top.sum()) / 12000)
    assert wide["exp_avg"]["codes_used"] == len(codes.unique())


def test_inspect_text_and_picture_have_all_parameters(tmp_path, capsys):
    path = plain_file(tmp_path / "all.pt", "log6")
    picture = tmp_path / "codes.png"
    assert main(["checkpoint", "inspect", str(path), "--plot", str(picture)]) == 0
    text = capsys.readouterr().out
    assert "wide" in text and "narrow" in text and "log6" in text
    assert "1 parameter(s) with float32 moments" in text
    assert picture.read_bytes().startswith(b"\x89PNG")


# --- diff ----------------------------------------------------------------------------------------


def test_diff_of_plain_and_dcp_is_0(made, capsys):
    assert called(capsys, "diff", made["plain"], made["dcp"], status=0)["compared"] == len(SHAPES)


def test_diff_of_one_value_says_which_parameter_and_by_how_much(tmp_path, capsys):
    path, other = plain_file(tmp_path / "a.pt"), tmp_path / "b.pt"
    found = torch.load(path, weights_only=True)
    state = found["optimizer"]["state"][0]
    codes = state["exp_avg_sq_q8"].view(-1)
    weights, old = found["model"], found["model"]["bias"][5].item()
    weights["bias"][0] = 0.0
    torch.save(found, path)
    codes[7000] = codes[7000] + 3 if codes[7000] < 250 else codes[7000] - 3
    weights["bias"][5] += 1
    weights["narrow"].view(-1)[0] = math.nan
    torch.save(found, other)
    result = called(capsys, "diff", path, other, status=1)
    different = {d.pop("name"): d for d in result["different"]}
    assert different["wide"].pop("exp_avg_sq").startswith("1 of 12000 elements by up to ")
    moved = 100 / max(abs(old), abs(old + 1))
    assert different == {
        "wide": {},
        "bias": {"weights": f"1 of 300 elements by up to {moved:.2g} % of the value"},
        "narrow": {"weights": "1 of 9600 elements by up to inf % of the value"},
    }


# --- All of them -----------------------------------------------------------------------------


def test_tools_load_neither_deepspeed_nor_an_op(forks, made):
    """They work where nothing can be compiled."""
    code = (
        "import sys; from zero8.cli import main; "
        f"status = main(['checkpoint', 'verify', {str(made['zero'])!r}]); "
        "assert status == 0; assert 'deepspeed' not in sys.modules; "
        "assert 'torch.utils.cpp_extension' not in sys.modules"
    )
    done = forks.run(code)
    assert done.returncode == 0, done.stderr


def test_inspect_of_a_folder_with_latest_takes_the_tag_that_it_names(zero, capsys):
    shutil.copytree(zero / "step3", zero / "step9")
    assert called(capsys, "inspect", zero, status=0)["path"].endswith("step3")


# --- Paths with links, which are the caller's own ------------------------------------------------


def test_commands_work_in_a_run_folder_that_is_reached_through_a_link(made, tmp_path, capsys):
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    shutil.copytree(made["zero"], tmp_path / "disk" / "zero")
    path, tag = tmp_path / "run" / "zero", tmp_path / "run" / "zero" / "step3"
    called(capsys, "seal", tag, status=0)
    assert called(capsys, "verify", path, status=0)["manifest"]
    assert called(capsys, "inspect", tag, status=0)["kind"] == "zero"
    assert called(capsys, "prune", path, "--keep", 1, status=0)["complete"] == ["step3"]
