# SPDX-License-Identifier: Apache-2.0
"""Saving, loading and copying the state of plain parameters.

`python tests/optimizer/test_optimizer_state.py` makes the golden file of the newest format again.
Do that only together with a new format version: the files stand for checkpoints that users have.
"""

import copy
import pickle

import pytest
import torch
from nests import assert_same
from places import GOLDEN
from small_optimizers import through_file
from torch import nn

from zero8 import Adam8bitBlockwise
from zero8.spec.adam import ADAM
from zero8.spec.codec import CODECS, codec_numbered, dequantize
from zero8.spec.grid import BlockGrid
from zero8.spec.packing import unpacked
from zero8.state.tell import tell_once

pytestmark = pytest.mark.usefixtures("one_torch_thread")
SAVED = GOLDEN / "plain_state.pt"
GOLDEN_SHAPES = {"wide": (2, 333), "experts": (2, 2, 100), "vector": (17,)}
SMALL = {"lr": 0.1, "min_8bit_size": 100}
FP32, BF16 = torch.float32, torch.bfloat16
codecs = pytest.mark.parametrize("codec", CODECS)
dtypes = pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)


def make_params(dtype: torch.dtype = FP32) -> list[tuple[str, nn.Parameter]]:
    params = []
    for number, (name, shape) in enumerate(GOLDEN_SHAPES.items()):
        generator = torch.Generator().manual_seed(number)
        params.append((name, nn.Parameter(torch.randn(shape, generator=generator).to(dtype))))
    return params


def run(optimizer, params, steps: int, start: int = 0) -> None:
    for step in range(start, start + steps):
        for number, (_, p) in enumerate(params):
            generator = torch.Generator().manual_seed(1000 * step + number)
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()


def trained(dtype=FP32, steps: int = 3, **keywords):
    """Return named parameters and their optimizer after a few steps."""
    params = make_params(dtype)
    optimizer = Adam8bitBlockwise(params, **{**SMALL, **keywords})
    run(optimizer, params, steps)
    return params, optimizer


def moments(state: dict) -> dict[str, torch.Tensor]:
    """Decode both moments of one parameter's state, by the format and the codec alone."""
    _, _, codes, block_size, _, *shape = state["format"].tolist()
    if not block_size:
        return {which: state[which] for which in ("exp_avg", "exp_avg_sq")}
    grid, numel = BlockGrid.of(tuple(shape), block_size), torch.Size(shape).numel()
    block, _ = grid.block_numbers(0, numel)
    decoded = {}
    for place, which in enumerate(("exp_avg", "exp_avg_sq")):
        code = codec_numbered(codes >> 8 * place & 0xFF).code_of(ADAM.moment(which))
        scales = state[f"{which}_scale"].reshape(-1, *code.scale_shape)
        stored = state[f"{which}_q{code.bits}"].flatten()
        x = dequantize(code, unpacked(stored, grid, 0, numel, code.bits), scales, block)
        decoded[which] = x.view(shape)
    return decoded


def assert_equal(params, others) -> None:
    for (name, p), (_, q) in zip(params, others, strict=True):
        assert torch.equal(p, q), name


# --- Round trips ---------------------------------------------------------------------------------


@codecs
@dtypes
@pytest.mark.parametrize("rounding", ["dither", "hash", False], ids=str)
def test_state_dict_through_a_file_continues_with_the_same_bits(codec, dtype, rounding):
    keywords = {"codec": codec, "stochastic_rounding": rounding}
    params, optimizer = trained(dtype, **keywords)
    resumed = [(name, nn.Parameter(p.detach().clone())) for name, p in params]
    other = Adam8bitBlockwise(resumed, **SMALL, **keywords)
    other.load_state_dict(through_file(optimizer.state_dict()))
    for (_, p), (_, q) in zip(params, resumed, strict=True):
        assert_same(optimizer.state[p], other.state[q])
    run(optimizer, params, 3, start=3)
    run(other, resumed, 3, start=3)
    assert_equal(params, resumed)


def test_state_dict_identity_of_the_dither_comes_from_the_checkpoint():
    """A resumed run goes on rounding where it was, though its parameters have other names."""
    params, optimizer = trained(BF16)
    resumed = [nn.Parameter(p.detach().clone()) for _, p in params]
    other = Adam8bitBlockwise(resumed, **SMALL)
    state_dict = optimizer.state_dict()
    for group in state_dict["param_groups"]:
        del group["param_names"]
    other.load_state_dict(state_dict)
    run(optimizer, params, 3, start=3)
    run(other, [(None, p) for p in resumed], 3, start=3)
    assert_equal(params, [(None, p) for p in resumed])


def test_state_entries_have_the_documented_types_and_shapes():
    params, optimizer = trained(BF16, codec="log")
    state = optimizer.state[params[1][1]]
    assert (state["step"], type(state["history"])) == (3, float)
    assert state["format"].tolist()[:4] == [1, 1, 0x0404, 256]
    assert state["format"].tolist()[5:] == [2, 2, 100]
    found = {k: (v.dtype, tuple(v.shape)) for k, v in state.items() if k.startswith("exp")}
    assert found == {
        "exp_avg_q8": (torch.uint8, (2, 2, 100)),
        "exp_avg_sq_q8": (torch.uint8, (2, 2, 100)),
        "exp_avg_scale": (FP32, (2, 2, 1)),
        "exp_avg_sq_scale": (FP32, (2, 2, 1, 2)),
    }
    vector = optimizer.state[params[2][1]]
    assert vector["format"].tolist()[1:4] == [1, 0, 0]
    assert vector["exp_avg"].dtype == vector["exp_avg_sq"].dtype == FP32


@dtypes
def test_loaded_state_shares_no_memory_with_the_dict(dtype):
    params, optimizer = trained(dtype)
    state_dict = copy.deepcopy(optimizer.state_dict())
    untouched = copy.deepcopy(state_dict)
    optimizer.load_state_dict(state_dict)
    theirs = {t.untyped_storage().data_ptr() for t in tensors_of(state_dict["state"])}
    ours = {t.untyped_storage().data_ptr() for t in tensors_of(optimizer.state)}
    assert not theirs & ours
    run(optimizer, params, 1, start=3)
    for key, state in untouched["state"].items():
        assert_same(state_dict["state"][key], state)


@pytest.mark.parametrize("theirs", [Adam8bitBlockwise, torch.optim.AdamW])
def test_loaded_state_of_tensors_in_a_graph_is_not_part_of_the_graph(theirs):
    params, optimizer = trained()
    other = theirs(make_params())
    run(other, [("", p) for p in other.param_groups[0]["params"]], 1)
    state_dict = copy.deepcopy(other.state_dict())
    for state in state_dict["state"].values():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                state[key] = value.clone().requires_grad_() * 1
    optimizer.load_state_dict(state_dict)
    assert not any(tensor.requires_grad for tensor in tensors_of(optimizer.state))
    run(copy.deepcopy(optimizer), params, 1)


def test_deepcopy_with_a_gradient_of_another_dtype_goes_on_with_the_same_bits():
    """torch's deepcopy of such a parameter fails."""
    p = torch.nn.Parameter(torch.linspace(-1, 1, 4096).view(64, 64))
    p.grad_dtype = torch.bfloat16
    p.grad = torch.linspace(1, 2, 4096).view(64, 64).to(torch.bfloat16)
    optimizer = Adam8bitBlockwise([p], lr=0.1)
    optimizer.step()
    new = copy.deepcopy({"again": optimizer, "optimizer": optimizer})
    assert new["again"] is new["optimizer"]
    (q,) = new["again"].param_groups[0]["params"]
    assert q is not p and q.grad is not p.grad
    assert q.grad.dtype == torch.bfloat16 and torch.equal(q.grad, p.grad)
    for one in (optimizer, new["again"]):
        one.step()
    assert torch.equal(p, q)


def tensors_of(states: dict) -> list[torch.Tensor]:
    found = [value for state in states.values() for value in state.values()]
    return [value for value in found if isinstance(value, torch.Tensor)]


@dtypes
def test_load_state_dict_of_fp32_adamw_quantizes_its_moments(dtype):
    """Moments within the codes' bounds, exact where they stay float32; the step count goes on."""
    params, theirs = make_params(dtype), make_params(dtype)
    adamw = torch.optim.AdamW(theirs, lr=0.1, foreach=False)
    run(adamw, theirs, 3)
    optimizer = Adam8bitBlockwise(params, codec="log", min_8bit_size=100)
    optimizer.load_state_dict(adamw.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.1
    for (_, p), (_, q) in zip(params, theirs, strict=True):
        state, exact = optimizer.state[p], adamw.state[q]
        assert state["step"] == 3 and type(state["step"]) is int
        decoded = moments(state)
        for which in ("exp_avg", "exp_avg_sq"):
            value = exact[which].float()
            if p.ndim == 1:
                assert torch.equal(decoded[which], value)
                continue
            # Half a code.  Of v that is 14/254 at most; of m 1/64 of |x| + s with a scale s of at
            # most 1/14.75 of the largest, or 1/32 with 1/247; and less than 2^-20 for roundings.
            top = value.abs().amax()
            bounds = {
                "exp_avg_sq": value * 14 / 254,
                "exp_avg": ((value.abs() + top / 14.75) / 64).maximum(
                    (value.abs() + top / 247) / 32
                ),
            }
            error = (decoded[which] - value).abs()
            assert (error <= bounds[which] * (1 + 2.0**-14)).all(), which
    run(optimizer, params, 2, start=3)


def test_load_state_dict_does_not_clip_moments_of_unknown_history():
    """Moments that another optimizer made: m^2/v may be anything."""
    params = make_params()
    optimizer = Adam8bitBlockwise(params, lr=1.0, eps=0.0, min_8bit_size=100)
    adamw = torch.optim.AdamW(params, lr=1.0)
    run(adamw, params, 1)
    for state in adamw.state.values():
        state["exp_avg"].fill_(1.0)
        state["exp_avg_sq"].fill_(2.0**-20)
    optimizer.load_state_dict(adamw.state_dict())
    before = [p.detach().clone() for _, p in params]
    for _, p in params:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for (_, p), old in zip(params, before, strict=True):
        assert ((p - old).abs() > 100).all()


OTHER = {
    "block size": {"block_size": 64},
    "codec": {"codec": "dynamic"},
    "to float32": {"min_8bit_size": 10**6},
    "to 8-bit": {"min_8bit_size": 1},
}


@pytest.mark.parametrize("keywords", OTHER.values(), ids=OTHER)
def test_load_state_dict_into_another_form_equals_quantizing_the_moments(keywords):
    """What a state decodes to, written into fresh states of the other form."""
    params, optimizer = trained(codec="log", min_8bit_size=500)
    others = make_params()
    other = Adam8bitBlockwise(others, **{**SMALL, "codec": "log", **keywords})
    other.load_state_dict(optimizer.state_dict())
    run_before = {name: moments(optimizer.state[p]) for name, p in params}
    dense = torch.optim.AdamW(make_params())
    state_dict = dense.state_dict()
    state_dict["state"] = {
        number: {"step": torch.tensor(3.0), **run_before[name]}
        for number, (name, _) in enumerate(params)
    }
    expected_params = make_params()
    expected = Adam8bitBlockwise(expected_params, **{**SMALL, "codec": "log", **keywords})
    expected.load_state_dict(state_dict)
    changed = 0
    for (name, p), (_, q), (_, old) in zip(others, expected_params, params, strict=True):
        state = other.state[p]
        assert (state["step"], state["history"]) == (3, optimizer.state[old]["history"])
        changed += state["format"].tolist() != optimizer.state[old]["format"].tolist()
        for which, value in moments(expected.state[q]).items():
            assert torch.equal(moments(state)[which], value), name
    assert changed
    run(other, others, 1, start=3)


SAVED_FORM = "codec='log', block_size=256"
OTHER_FORMS = {
    "block size": (SAVED_FORM, "codec='log', block_size=64"),
    "codec": (SAVED_FORM, "codec='dynamic', block_size=256"),
    "to float32": (SAVED_FORM, "float32 moments"),
    "to 8-bit": ("float32 moments", SAVED_FORM),
    "the same": None,
}


@pytest.mark.parametrize("name", OTHER_FORMS)
def test_load_state_dict_into_another_form_logs_it_once(name, caplog):
    tell_once.cache_clear()
    _, optimizer = trained(codec="log", min_8bit_size=500)
    settings = {**SMALL, "min_8bit_size": 500, **OTHER.get(name, {})}
    other = Adam8bitBlockwise(make_params(), **settings)
    for _ in range(2):
        other.load_state_dict(optimizer.state_dict())
    said = [r.getMessage() for r in caplog.records if "were saved with" in r.getMessage()]
    if forms := OTHER_FORMS[name]:
        (line,) = said
        start = "zero8: moments were saved with {} and loaded with {}, the optimizer"
        assert line.startswith(start.format(*forms))
    else:
        assert said == []


def test_load_state_dict_of_another_models_adamw_raises():
    other = nn.Parameter(torch.zeros(2, 334))
    adamw = torch.optim.AdamW([other])
    other.grad = torch.ones_like(other)
    adamw.step()
    p = nn.Parameter(torch.zeros(2, 333))
    optimizer = Adam8bitBlockwise([p])
    with pytest.raises(ValueError, match=r"got moments of shape \(2, 334\), .*\(2, 333\)"):
        optimizer.load_state_dict(adamw.state_dict())
    assert not optimizer.state


# --- Copies --------------------------------------------------------------------------------------


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda both: pickle.loads(pickle.dumps(both))}


@pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("named", [True, False], ids=["named", "unnamed"])
@pytest.mark.parametrize("steps", [0, 2])
def test_optimizer_copy_continues_with_the_same_bits(duplicate, named, steps):
    """The settings that states are made by are copied too."""
    params = make_params(BF16)
    keywords = {"lr": 0.1, "codec": "dynamic", "seed": 7, "stochastic_rounding": "hash"}
    keywords |= {"bias_correction": False, "block_size": 64}
    keywords |= SMALL | {"fp32_params": ["wide"]} if named else {"min_8bit_size": 500}
    optimizer = Adam8bitBlockwise(params if named else [p for _, p in params], **keywords)
    run(optimizer, params, steps)
    params2, optimizer2 = duplicate((params, optimizer))
    assert type(optimizer2) is Adam8bitBlockwise
    run(optimizer, params, 3, start=steps)
    run(optimizer2, params2, 3, start=steps)
    assert_equal(params, params2)
    for (_, p), (_, q) in zip(params, params2, strict=True):
        assert_same(optimizer.state[p], optimizer2.state[q])


# --- The golden file -----------------------------------------------------------------------------


def write_golden() -> None:
    """Write states of all codecs and dtypes, and beside them the moments that they decode to."""
    golden = {}
    for codec in CODECS:
        for dtype in (FP32, BF16):
            params, optimizer = trained(dtype, steps=5, codec=codec, lr=0.01)
            golden[f"{codec} {dtype}"] = {
                "state_dict": optimizer.state_dict(),
                "moments": [moments(optimizer.state[p]) for _, p in params],
            }
    SAVED.parent.mkdir(exist_ok=True)
    torch.save(golden, SAVED)


@dtypes
@codecs
def test_golden_state_loads_verbatim_and_decodes_to_the_moments_beside_it(codec, dtype):
    saved = torch.load(SAVED, weights_only=True)[f"{codec} {dtype}"]
    params = make_params(dtype)
    optimizer = Adam8bitBlockwise(params, codec=codec, min_8bit_size=100)
    optimizer.load_state_dict(copy.deepcopy(saved["state_dict"]))
    for number, (name, p) in enumerate(params):
        state = optimizer.state[p]
        assert_same(state, saved["state_dict"]["state"][number])
        for which, value in moments(state).items():
            assert torch.equal(value, saved["moments"][number][which]), f"{name} {which}"
            assert value.any()
    run(optimizer, params, 1, start=5)


def test_state_dict_in_fp32_has_the_live_moments_that_are_float32():
    p = torch.nn.Parameter(torch.ones(100))
    optimizer = Adam8bitBlockwise([p], state_dict_format="fp32")
    p.grad = torch.ones(100)
    optimizer.step()
    saved = optimizer.state_dict()["state"][0]
    assert saved["exp_avg"].data_ptr() == optimizer.state[p]["exp_avg"].data_ptr()


if __name__ == "__main__":
    write_golden()
