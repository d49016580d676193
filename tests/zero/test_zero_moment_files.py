# SPDX-License-Identifier: Apache-2.0
"""Copies and files of 8-bit moments."""

import copy
import io
import pickle
import sys

import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param
from moment_samples import MOMENTS, buffers, flipped_in, is_plain, moment, same
from mutations import take_steps, zero_optimizer
from processes import run
from zero_worker import config, make_engine, train

from zero8.deepspeed.moment_tensor import BUFFERS, HEADER, MomentTensor, moment_of, with_moments
from zero8.spec.codec import CODECS


def test_deepcopy_of_a_state_keeps_moments_8bit_and_apart_from_the_original():
    x = moment()
    state = {"exp_avg": x, "again": x, "fragment": x[100:200]}
    copied = copy.deepcopy(state)
    assert isinstance(copied["exp_avg"], MomentTensor)
    assert copied["again"] is copied["exp_avg"]
    assert same(buffers(copied["exp_avg"]), buffers(x))
    assert is_plain(copied["fragment"])
    assert torch.equal(copied["fragment"], x[100:200].dense())
    x.zero_()
    assert copied["exp_avg"].dense().abs().max() > 0


def saved(thing, **options):
    file = io.BytesIO()
    torch.save(thing, file, **options)
    file.seek(0)
    return file


def pickled(x):
    return pickle.loads(pickle.dumps(x))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("which", MOMENTS)
def test_save_and_load_with_weights_only_restores_every_byte(codec, which):
    x = moment(codec, which).to(torch.bfloat16)
    y = with_moments(torch.load(saved({"exp_avg": x, "step": 3}), weights_only=True))["exp_avg"]
    assert isinstance(y, MomentTensor) and same(buffers(y), buffers(x))
    assert y.store.table == x.store.table
    assert (y.store.codec, y.store.name) == (x.store.codec, which)


def test_optimizer_that_is_pickled_as_a_whole_goes_on_with_the_same_bits():
    params, optimizer = zero_optimizer()
    take_steps(params, optimizer, 2)
    again = pickled(optimizer)
    copies = again.param_groups[0]["params"]
    for one in ((params, optimizer), (copies, again)):
        take_steps(*one, 1)
    assert torch.equal(params[0], copies[0])
    states = optimizer.state[params[0]], again.state[copies[0]]
    for which in MOMENTS:
        assert same(*(buffers(state[which]) for state in states))


def test_save_of_a_view_writes_its_elements_only():
    x = moment()
    y = torch.load(saved(x[100:200]), weights_only=True)
    assert is_plain(y) and torch.equal(y, x[100:200].dense())


def in_header(**changes):
    return lambda found: found[HEADER].update(changes)


def in_piece(number, **changes):
    return lambda found: found[HEADER]["pieces"][number].update(changes)


def in_buffer(key, change):
    return lambda found: found.update({key: change(found[key])})


DAMAGES = {
    "another version": (in_header(version=4), "version 4"),
    "another algorithm": (in_header(algorithm="adagrad"), "algorithm 'adagrad'"),
    "unknown codec": (in_header(codec=99), "codec number 99"),
    "piece with other size": (in_piece(0, numel=599), "damaged"),
    "piece with other blocks": (in_piece(2, block_size=256, shape=[80, 256]), "damaged"),
    "piece gone": (lambda found: found[HEADER]["pieces"].pop(), "damaged"),
    "piece 8-bit instead of float32": (in_piece(1, block_size=64), "damaged"),
    "no version": (lambda found: found[HEADER].pop("version"), "version None"),
    "no pieces": (lambda found: found[HEADER].pop("pieces"), "damaged"),
    "no name in a piece": (lambda found: found[HEADER]["pieces"][0].pop("name"), "damaged"),
    "unknown key in a piece": (in_piece(0, colour=3), "damaged"),
    "unknown moment": (in_header(which="exp_max"), "damaged"),
    "codes short": (in_buffer("codes", lambda t: t[:-1]), "damaged"),
    "scales short": (in_buffer("scales", lambda t: t[:-1]), "damaged"),
    "values short": (in_buffer("float32", lambda t: t[:-1]), "damaged"),
    "codes as float": (in_buffer("codes", torch.Tensor.float), "damaged"),
    "no codes": (in_buffer("codes", lambda t: None), "damaged"),
    "sparse codes": (in_buffer("codes", torch.Tensor.to_sparse), "expected"),
    "one code for all": (in_buffer("codes", lambda t: t[:1].expand(len(t))), "expected"),
    "scales on meta": (in_buffer("scales", lambda t: t.to("meta")), "expected"),
    "no hash": (in_header(hash=None), "its bytes have the hash .*; the file is damaged"),
    "another hash": (in_header(hash=1.0), "its bytes have the hash .*; the file is damaged"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_load_of_a_damaged_moment_is_refused(damage, message):
    found = pickled(moment())
    damage(found)
    with pytest.raises(ValueError, match=message):
        moment_of(found)


@pytest.mark.parametrize("is_legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("which", MOMENTS)
@pytest.mark.parametrize("number", [0, 1, 2], ids=BUFFERS)
def test_load_of_a_moment_with_a_flipped_bit_is_refused_by_its_name(number, which, is_legacy):
    """torch compares no CRCs."""
    x = moment(which=which)
    data = saved({which: x}, _use_new_zipfile_serialization=not is_legacy).getvalue()
    whole = with_moments(torch.load(io.BytesIO(data), weights_only=not is_legacy))[which]
    assert same(buffers(whole), buffers(x))
    data = flipped_in(data, buffers(x)[number])
    damaged = torch.load(io.BytesIO(data), weights_only=not is_legacy)
    message = f"moment {which} of 'layers.0.weight' and 2 more: its bytes .*; the file is damaged"
    with pytest.raises(ValueError, match=message):
        with_moments(damaged)


# --- Without zero8 -------------------------------------------------------------------------------

LAYOUTS = {
    "two": config(stage=2),
    "three": config(stage=3),
    "lion": config(stage=2, optimizer="Lion8bitBlockwise", dtype={}),
}
WITHOUT = """
import runpy, sys

class Missing:
    def find_spec(self, name, *_):
        if name.partition(".")[0] == "zero8":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
import torch
_, folder, *tags = sys.argv
weights_of = runpy.run_path(f"{folder}/zero_to_fp32.py")["get_fp32_state_dict_from_zero_checkpoint"]
for tag in tags:
    torch.save(weights_of(folder, tag), f"{folder}/{tag}.weights")
assert "zero8" not in sys.modules
"""


def save_all(folder):
    """Save a checkpoint of each layout; return their master weights."""
    masters = {}
    for tag, ds_config in LAYOUTS.items():
        engine = make_engine(ds_config)
        train(engine, 2)
        engine.save_checkpoint(folder, tag=tag)
        named = engine.module.named_parameters()
        masters[tag] = {name: safe_get_full_fp32_param(p).clone() for name, p in named}
    return masters


def test_files_of_zero_give_their_weights_where_zero8_is_missing(standing_ranks, tmp_path):
    masters = standing_ranks(2).run(save_all, folder=str(tmp_path))[0]
    command = [sys.executable, "-c", WITHOUT, str(tmp_path), *LAYOUTS]
    done = run(command, 120, TORCH_DEVICE_BACKEND_AUTOLOAD="0", DS_ACCELERATOR="cpu")
    assert done.returncode == 0, done.stderr
    for tag, expected in masters.items():
        found = torch.load(tmp_path / f"{tag}.weights", weights_only=True)
        assert all(torch.equal(found[name], values) for name, values in expected.items())
        for path in (tmp_path / tag).glob("*.pt"):
            needed = torch.serialization.get_unsafe_globals_in_checkpoint(path)
            assert all(name.startswith("deepspeed.") for name in needed), needed
