# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of torchao 0.18, with what they decode to.

They were made by `git show 5c62b323:tests/golden/write_torchao.py`.
"""

import pytest
import torch
from convert_cases import same
from places import GOLDEN

from zero8 import Adam8bitBlockwise
from zero8.checkpoint.commands.convert import convert
from zero8.checkpoint.read.foreign import from_foreign
from zero8.checkpoint.read.inert import Inert
from zero8.checkpoint.read.safe_load import load
from zero8.checkpoint.read.torchao_weights import values_of
from zero8.spec.adam import ADAM
from zero8.state.weights import INT8_ROWS

CODECS = {"8bit": "dynamic", "fp8": "fp8", "4bit": "linear4"}
ROWS_OF_BLOCKS, ROWS_ACROSS_BLOCKS, SMALL = range(3)


def golden(name):
    """Return the content of a file as zero8's reader sees it."""
    return load(GOLDEN / f"torchao_{name}.pt")


@pytest.fixture(params=CODECS)
def converted(request, tmp_path):
    """The codec, the state dict that `zero8 checkpoint convert` made, and the moments in it."""
    convert(GOLDEN / f"torchao_{request.param}.pt", tmp_path / "out.pt", "plain")
    state_dict = torch.load(tmp_path / "out.pt", weights_only=True)
    return CODECS[request.param], state_dict, golden(request.param)


def test_torchao_that_a_script_has_imported_is_not_called():
    class OptimState8bit(torch.Tensor):
        pass

    name = "torchao.optim.subclass_8bit.OptimState8bit"
    with torch.serialization.safe_globals([(OptimState8bit, name)]):
        before = set(torch.serialization.get_safe_globals())
        moment = golden("8bit")["optimizer"]["state"][ROWS_OF_BLOCKS]["exp_avg"]
        assert set(torch.serialization.get_safe_globals()) == before
    assert isinstance(moment, Inert) and moment.name == name


def assert_same_entries(which, ours, theirs):
    """Two codes to a byte in both, but in zero8 those of exp_avg count from 0, entry 7 of 16."""
    first = 7 if which == "exp_avg" else 0
    for shift in (0, 4):
        assert torch.equal((ours >> shift) + first & 15, theirs >> shift & 15)


def test_convert_of_torchao_where_blocks_coincide_keeps_codes_and_scales(converted):
    codec, state_dict, theirs = converted
    saved, state = theirs["optimizer"]["state"][ROWS_OF_BLOCKS], state_dict["state"][ROWS_OF_BLOCKS]
    for which in ADAM.moment_names:
        codes, scale = saved[which].state["codes"], saved[which].state["scale"]
        if codec == "fp8":  # -0 is 0
            codes = codes.view(torch.uint8)
            codes = torch.where(codes == 128, 0, codes)
        if codec == "linear4":
            assert_same_entries(which, state[f"{which}_q4"].flatten(), codes)
        else:
            assert torch.equal(state[f"{which}_q8"], codes) and codes.any()
        assert torch.equal(state[f"{which}_scale"].flatten(), scale)


def assert_decoded(found, expected, codec):
    """`dynamic` computes its entries, within 2^-20 of torchao's."""
    rtol = 2.0**-20 if codec == "dynamic" else 0.0
    torch.testing.assert_close(found, expected, rtol=rtol, atol=0.0)


def test_convert_of_torchao_where_blocks_differ_decodes(converted):
    codec, state_dict, theirs = converted
    for number in (ROWS_ACROSS_BLOCKS, SMALL):
        for which in ADAM.moment_names:
            expected = theirs["moments"][number][which]
            assert_decoded(state_dict["state"][number][which], expected, codec)
            assert expected.any()


def test_convert_of_torchao_loads_and_goes_on(converted):
    codec, state_dict, theirs = converted
    shapes = [moments["exp_avg"].shape for moments in theirs["moments"]]
    params = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    block_size = 128 if codec == "linear4" else 256
    optimizer = Adam8bitBlockwise(params, codec=codec, block_size=block_size)
    optimizer.load_state_dict(state_dict)
    (group,) = optimizer.param_groups
    assert (group["betas"], group["weight_decay"]) == ((0.9, 0.99), 0.1)
    assert group["lr"] == pytest.approx(1e-3) and type(group["lr"]) is float
    for number in (ROWS_OF_BLOCKS, SMALL):
        p = params[number]
        for store in optimizer.moments(p):
            moment = store.read(0, p.numel()).view(p.shape)
            assert_decoded(moment, theirs["moments"][number][store.name], codec)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert all(optimizer.state[p]["step"] == 18 and p.isfinite().all() for p in params)


REFUSED = [
    ("8bit", {"scale": torch.ones(17)}, "got 17 scales of 4096 codes"),
    ("8bit", {"scale": torch.ones(32)}, ".* in blocks of 128, expected .* in blocks of 256"),
    ("8bit", {"scale": torch.ones(16).half()}, "got codes or scales of an unknown type"),
    ("8bit", {"qmap": torch.linspace(0, 1, 256)}, "got a map that is not that of dynamic"),
    ("4bit", {"codes": torch.ones(2047, dtype=torch.uint8)}, "got .* bytes of codes of shape"),
    ("4bit", {"_shape": 4096}, "got .* bytes of codes of shape"),
]


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED)
def test_import_of_torchao_with_what_does_not_fit_is_refused(name, changes, message):
    state_dict = golden(name)["optimizer"]
    state_dict["state"][ROWS_OF_BLOCKS]["exp_avg_sq"].state |= changes
    with pytest.raises(ValueError, match=f"exp_avg_sq: {message}"):
        from_foreign(state_dict)


def test_convert_of_torchao_with_a_code_that_is_nan_is_refused(tmp_path):
    content = (GOLDEN / "torchao_fp8.pt").read_bytes()
    codes = golden("fp8")["optimizer"]["state"][ROWS_OF_BLOCKS]["exp_avg"].state["codes"]
    whole = codes.view(torch.uint8).numpy().tobytes()
    assert content.count(whole) == 1
    (tmp_path / "in.pt").write_bytes(content.replace(whole, b"\x7f" + whole[1:]))
    with pytest.raises(ValueError, match="a code that is NaN"):
        convert(tmp_path / "in.pt", tmp_path / "out.pt", "plain")


# --- Weights -------------------------------------------------------------------------------------

DTYPES = {
    "int8.weight": torch.float32,
    "int8_bfloat16.weight": torch.float32,  # only the scales are in bfloat16
    "int8_matmuls.weight": torch.float32,
    "bitnet.weight": torch.bfloat16,
    "float8.weight": torch.float32,
}
CODES, SCALES = torch.ones(3, 5, dtype=torch.int8), torch.ones(3)


def test_convert_of_torchao_weights_has_their_values_and_states(tmp_path):
    result = convert(GOLDEN / "torchao_weights.pt", tmp_path / "out", "plain")
    assert result["has_weights"] and result["notes"] == []
    theirs, found = golden("weights"), torch.load(tmp_path / "out", weights_only=True)
    assert all(isinstance(saved, Inert) for saved in theirs["model"].values())
    assert {name: values.dtype for name, values in found["model"].items()} == DTYPES
    for number, (name, values) in enumerate(found["model"].items()):
        assert torch.equal(values, theirs["values"][name]) and values.any(), name
        state = theirs["optimizer"]["state"][number]
        assert same(found["optimizer"]["state"][number], state, state)


@pytest.mark.parametrize(
    ("parts", "got"),
    [
        ({"int_data": CODES[0], "scale": SCALES}, r"got int_data of shape \(5,\)"),
        ({"int_data": CODES, "scale": torch.ones(4)}, r".* scale of shape \(4,\)"),
        ({"int_data": CODES, "scale": SCALES.half()}, r".* \(3,\), torch.float16"),
        ({"int_data": CODES, "scale": Inert("torch.Tensor", ())}, ".* a value of type Inert"),
        *((parts, "got a weight of torchao's without its tensors") for parts in (None, {})),
    ],
)
def test_reader_of_weights_whose_tensors_do_not_fit_raises_value_error(parts, got):
    saved = Inert(f"torchao.somewhere.{INT8_ROWS}", ())
    saved.state = parts
    with pytest.raises(ValueError, match=f"'w': {got}"):
        values_of("w", saved)
