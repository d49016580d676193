# SPDX-License-Identifier: Apache-2.0
"""Copies and files of 8-bit moments."""

import copy
import io
import pickle
import pickletools
import sys

import pytest
import torch
import xxhash
from deepspeed.utils import safe_get_full_fp32_param
from moment_samples import MOMENTS, buffers, flipped_in, is_plain, moment, same
from mutations import take_steps, zero_optimizer
from processes import run
from zero_worker import config, make_engine, train

from zero8.deepspeed import moment_tensor, swap_file
from zero8.deepspeed.moment_tensor import BUFFERS, HEADER, MomentTensor, moment_of, with_moments
from zero8.spec.adam import ADAM
from zero8.spec.codec import CODECS, codec_named
from zero8.state.store import MomentStore
from zero8.state.table import Piece, PieceTable


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


def test_pickle_names_no_class_of_ours():
    data = pickle.dumps({"exp_avg": moment()})
    named = {arg for _, arg, _ in pickletools.genops(data) if isinstance(arg, str)}
    assert "OrderedDict" in named and not any(name.startswith("zero8.") for name in named)
    found = pickle.loads(data)["exp_avg"]
    assert list(found) == ["zero8_moment", "codes", "scales", "float32"]
    assert all(is_plain(value) for value in list(found.values())[1:])


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


def test_saved_file_takes_a_byte_per_element():
    """Codes, scales and float32 values; the zip of torch.save adds a few records of under 512
    bytes each, and the description of three pieces fits 1 KiB."""
    x = moment()
    size = len(saved(x).getvalue())
    content = sum(tensor.nbytes for tensor in buffers(x))
    assert content < size < content + 16 * 512 + 1024
    big = MomentStore.zeros(
        codec_named("log"),
        ADAM.moment("exp_avg"),
        PieceTable((Piece(0, 2**20, 0, (4096, 256), 1, 256, "p"),), 2**20),
    )
    assert len(saved(MomentTensor(big)).getvalue()) < 1.03 * 2**20


DAMAGES = {
    "another version": (lambda d: d.update(version=4), "version 4"),
    "another algorithm": (lambda d: d.update(algorithm="adagrad"), "algorithm 'adagrad'"),
    "unknown codec": (lambda d: d.update(codec=99), "codec number 99"),
    "piece with other size": (lambda d: d["pieces"][0].update(numel=599), "damaged"),
    "piece with other blocks": (
        lambda d: d["pieces"][2].update(block_size=256, shape=[80, 256]),
        "damaged",
    ),
    "piece gone": (lambda d: d["pieces"].pop(), "damaged"),
    "piece 8-bit instead of float32": (lambda d: d["pieces"][1].update(block_size=64), "damaged"),
    "no version": (lambda d: d.pop("version"), "version None"),
    "no pieces": (lambda d: d.pop("pieces"), "damaged"),
    "no name in a piece": (lambda d: d["pieces"][0].pop("name"), "damaged"),
    "unknown key in a piece": (lambda d: d["pieces"][0].update(colour=3), "damaged"),
    "unknown moment": (lambda d: d.update(which="exp_max"), "damaged"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_load_with_damaged_description_is_refused(name):
    damage, message = DAMAGES[name]
    found = pickled(moment())
    damage(found[HEADER])
    with pytest.raises(ValueError, match=message):
        moment_of(found)


BUFFER_DAMAGES = {
    "codes short": ("codes", lambda t: t[:-1]),
    "scales short": ("scales", lambda t: t[:-1]),
    "values short": ("float32", lambda t: t[:-1]),
    "codes as float": ("codes", torch.Tensor.float),
    "scales as half": ("scales", torch.Tensor.half),
    "no codes": ("codes", lambda t: None),
    "sparse codes": ("codes", torch.Tensor.to_sparse),
    "one code for all": ("codes", lambda t: t[:1].clone().expand(len(t))),
    "scales on meta": ("scales", lambda t: t.to("meta")),
}


@pytest.mark.parametrize("name", BUFFER_DAMAGES)
def test_load_with_damaged_buffers_is_refused(name):
    found = pickled(moment())
    key, damage = BUFFER_DAMAGES[name]
    found[key] = damage(found[key])
    with pytest.raises(ValueError, match="damaged|expected"):
        moment_of(found)


# --- The hash of the bytes -----------------------------------------------------------------------


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


def test_hash_is_the_xxh3_of_codes_scales_and_values_in_this_order(monkeypatch):
    x = moment(which="exp_avg_sq")
    whole = b"".join(tensor.numpy().tobytes() for tensor in buffers(x))
    for chunk_numel in (1 << 22, 100, 7):
        monkeypatch.setattr(moment_tensor, "CHUNK_NUMEL", chunk_numel)
        assert pickled(x)[HEADER]["hash"] == xxhash.xxh3_64_intdigest(whole)


@pytest.mark.parametrize("value", [None, True, 1.0, "1", -1, 2**64, [1]])
def test_load_with_a_hash_that_is_none_is_refused(value):
    found = pickled(moment())
    found[HEADER]["hash"] = value
    with pytest.raises(ValueError, match=r"its bytes have the hash .*; the file is damaged"):
        moment_of(found)


def test_description_in_a_swap_file_is_without_a_hash():
    """Those files have one of their own."""
    layout = swap_file.Layout.of_state({which: moment(which=which) for which in MOMENTS})
    assert b"hash" not in layout.description


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
