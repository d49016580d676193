# SPDX-License-Identifier: Apache-2.0
"""Copies and files of 8-bit moments.

`python tests/zero/test_zero_moment_files.py` makes its file in tests/golden again; a file that is
out in the world must stay readable, so that is for a new format version only.
"""

import copy
import io
import pickle
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
import xxhash
from moment_samples import MOMENTS, NUMEL, PIECES, buffers, flipped_in, is_plain, moment, same
from places import GOLDEN

import zero8  # noqa: F401  allows the pickles
from zero8.algorithms.adam import ADAM
from zero8.spec.codec import CODECS, RETIRED, codec_named
from zero8.state.store import MomentStore
from zero8.state.table import Piece, PieceTable
from zero8.zero import moment_tensor, swap_file
from zero8.zero.moment_tensor import MomentTensor, moment_description, rebuild_moment

SAVED = GOLDEN / "zero_moment_v3.pt"
FORMAT_2 = GOLDEN / "zero_moment_v2.pt"
FORMAT_1 = GOLDEN / "zero_moment_v1.pt"


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


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("which", MOMENTS)
def test_save_and_load_with_weights_only_restores_every_byte(codec, which):
    x = moment(codec, which).to(torch.bfloat16)
    y = torch.load(saved({"exp_avg": x}), weights_only=True)["exp_avg"]
    assert isinstance(y, MomentTensor) and same(buffers(y), buffers(x))
    assert y.store.table == x.store.table
    assert (y.store.codec, y.store.name) == (x.store.codec, which)


def test_pickle_round_trip_restores_every_byte():
    x = moment()
    assert same(buffers(pickle.loads(pickle.dumps(x))), buffers(x))


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
    x = moment()
    description = copy.deepcopy(moment_description(x.store))
    damage(description)
    with pytest.raises(ValueError, match=message):
        rebuild_moment(description, *buffers(x))


BUFFER_DAMAGES = {
    "codes short": lambda codes, scales, dense: (codes[:-1], scales, dense),
    "scales short": lambda codes, scales, dense: (codes, scales[:-1], dense),
    "values short": lambda codes, scales, dense: (codes, scales, dense[:-1]),
    "codes as float": lambda codes, scales, dense: (codes.float(), scales, dense),
    "scales as half": lambda codes, scales, dense: (codes, scales.half(), dense),
}


@pytest.mark.parametrize("name", BUFFER_DAMAGES)
def test_load_with_damaged_buffers_is_refused(name):
    x = moment()
    with pytest.raises(ValueError, match="damaged"):
        rebuild_moment(moment_description(x.store), *BUFFER_DAMAGES[name](*buffers(x)))


# --- The hash of the bytes -----------------------------------------------------------------------

BUFFERS = ("codes", "scales", "float32 values")


def pickled_description(x):
    return x.__reduce_ex__(pickle.DEFAULT_PROTOCOL)[1][0]


USES = {
    "read": MomentTensor.dense,
    "narrow": lambda x: x.narrow(0, 3, 5),
    "detach": torch.Tensor.detach,
    "copy_": lambda x: torch.empty(NUMEL).copy_(x),
    "write": lambda x: x[:1].fill_(0.0),
    "to": lambda x: x.to("cpu", copy=True),
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "send": ForkingPickler.dumps,
    "share": MomentTensor.share_memory_,
}


@pytest.mark.parametrize("is_legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("which", MOMENTS)
@pytest.mark.parametrize("name", BUFFERS)
def test_first_use_of_a_moment_with_a_flipped_bit_is_refused_by_its_name(name, which, is_legacy):
    """In torch's legacy format the bytes come after all objects."""
    x = moment(which=which)
    data = saved({which: x}, _use_new_zipfile_serialization=not is_legacy).getvalue()
    whole = torch.load(io.BytesIO(data), weights_only=not is_legacy)[which]
    assert same(buffers(whole), buffers(x)) and torch.equal(whole.clone(), x.clone())
    data = flipped_in(data, buffers(x)[BUFFERS.index(name)])
    message = f"moment {which} of 'layers.0.weight' and 2 more: its bytes .*; the file is damaged"
    damaged = torch.load(io.BytesIO(data), weights_only=not is_legacy)[which]
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            damaged.dense()


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_any_first_use_compares_the_hash_and_none_after_it(use, monkeypatch):
    calls, hash_of = [], moment_tensor._hash_of
    monkeypatch.setattr(moment_tensor, "_hash_of", lambda x: calls.append(1) or hash_of(x))
    x = pickle.loads(pickle.dumps(moment()))
    assert len(calls) == 1  # of what was pickled
    use(x)
    seen = len(calls)
    x.dense()
    assert 2 <= seen == len(calls)


def test_hash_is_the_xxh3_of_codes_scales_and_values_in_this_order(monkeypatch):
    x = moment(which="exp_avg_sq")
    whole = b"".join(tensor.numpy().tobytes() for tensor in buffers(x))
    for chunk_numel in (1 << 22, 100, 7):
        monkeypatch.setattr(moment_tensor, "CHUNK_NUMEL", chunk_numel)
        assert pickled_description(x)["hash"] == xxhash.xxh3_64_intdigest(whole)


def test_moments_that_were_saved_without_a_hash_are_not_compared():
    x = moment()
    description, tensors = moment_description(x.store), [tensor.clone() for tensor in buffers(x)]
    assert "hash" not in description
    tensors[0][700] ^= 1
    assert same(buffers(rebuild_moment(description, *tensors)), tensors)


@pytest.mark.parametrize("value", [None, True, 1.0, "1", -1, 2**64, [1]])
def test_load_with_a_hash_that_is_none_is_refused(value):
    x = moment()
    with pytest.raises(ValueError, match=r"8-bit moment: got a hash of .*; the file is damaged"):
        rebuild_moment({**moment_description(x.store), "hash": value}, *buffers(x))


UNLIKELY = {
    "sparse": lambda codes: codes.to_sparse(),
    "one element for all": lambda codes: codes[:1].clone().expand(len(codes)),
}


@pytest.mark.parametrize("name", UNLIKELY)
def test_load_with_a_hash_of_what_is_no_plain_memory_is_refused(name):
    x = moment()
    codes, scales, dense = buffers(x)
    y = rebuild_moment(pickled_description(x), UNLIKELY[name](codes), scales, dense)
    with pytest.raises(ValueError, match="the file is damaged"):
        y.compare_hash()


def test_hash_of_strided_codes_is_that_of_contiguous_ones():
    x = moment()
    codes, scales, dense = buffers(x)
    strided = torch.empty(2 * len(codes), dtype=torch.uint8)[::2].copy_(codes)
    y = rebuild_moment(pickled_description(x), strided, scales, dense)
    assert pickled_description(y) == pickled_description(x)


def test_load_onto_the_meta_device_compares_nothing_and_saves_no_hash():
    x = moment()
    y = torch.load(saved(x), map_location="meta", weights_only=True)
    assert (y.device.type, y.store.table) == ("meta", x.store.table)
    assert pickled_description(y) == moment_description(x.store)


def test_load_of_fake_tensors_compares_nothing():
    file = saved(moment())
    with torch._subclasses.FakeTensorMode():
        assert torch.load(file, weights_only=True).shape == (NUMEL,)


def test_shared_moment_is_saved_without_a_hash():
    x = moment().share_memory_()
    assert pickled_description(x) == moment_description(x.store)
    y = torch.load(saved(x), weights_only=True)
    assert same(buffers(y), buffers(x))


def test_moment_that_changes_on_its_way_to_another_process_arrives():
    """torch sends its memory, which is made shared memory then, and not the bytes it had."""
    x = moment()
    data = ForkingPickler.dumps({"whole": x, "part": x[100:200]})
    x.zero_()
    y = pickle.loads(data)
    assert same(buffers(y["whole"]), buffers(x))
    assert y["part"].abs().max() > 0


def test_description_in_a_swap_file_is_without_a_hash():
    """Those files have one of their own."""
    layout = swap_file.Layout.of_state({which: moment(which=which) for which in MOMENTS})
    assert b"hash" not in layout.description


# --- Files that are out in the world -------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "codecs"),
    [(FORMAT_2, ["dynamic", "log"]), (SAVED, sorted(CODECS))],
    ids=["format 2", "format 3"],
)
def test_golden_file_reads_as_the_stored_values(path, codecs):
    content = torch.load(path, weights_only=True)
    assert sorted(content) == codecs
    for name, moments in content.items():
        assert sorted(moments) == sorted(MOMENTS)
        for which, (x, values) in moments.items():
            assert (x.store.codec.name, x.store.name) == (name, which)
            assert x.store.table == PieceTable(PIECES, NUMEL)
            assert torch.equal(x.dense(), values)


def test_golden_file_of_format_1_reads_as_the_stored_values_and_copies_by_value():
    content = torch.load(FORMAT_1, weights_only=True)
    assert sorted(content) == ["dynamic", "log"]
    for name, moments in content.items():
        for which, (x, values) in moments.items():
            assert x.store.codec in (CODECS["dynamic"], RETIRED)
            assert x.store.table == PieceTable(PIECES, NUMEL)
            assert torch.equal(x.dense(), values)
            target, expected = moment(name, which, seed=2), moment(name, which, seed=2)
            target.copy_(x)
            expected.copy_(values)
            assert same(buffers(target), buffers(expected))


def write_golden():
    content = {codec: {} for codec in CODECS}
    for codec in CODECS:
        for which in MOMENTS:
            x = moment(codec, which)
            content[codec][which] = (x, x.dense())
    SAVED.parent.mkdir(exist_ok=True)
    torch.save(content, SAVED)


if __name__ == "__main__":
    write_golden()
