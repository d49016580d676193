# SPDX-License-Identifier: Apache-2.0
"""States that did not come from a step: each is fitted to its parameter or refused, and then the
kernel touches nothing.  test_sanitized.py runs this again with the sanitizers watching.
"""

import copy
from contextlib import suppress

import pytest
import torch
from nests import difference
from small_optimizers import through_file

import zero8

pytestmark = pytest.mark.usefixtures("one_torch_thread")
SHAPES = {"a": (64, 1000), "b": (33,), "c": (70, 300)}
CODES = ("exp_avg_q8", "exp_avg_sq_q8")
TENSORS = (*CODES, "exp_avg_scale", "exp_avg_sq_scale")


def made():
    generator = torch.Generator().manual_seed(1)
    named = [
        (name, torch.nn.Parameter(torch.randn(shape, generator=generator)))
        for name, shape in SHAPES.items()
    ]
    optimizer = zero8.Adam8bitBlockwise(named, lr=1e-2)
    step(dict(named), optimizer, 0)
    return dict(named), optimizer


def step(params, optimizer, number):
    generator = torch.Generator().manual_seed(100 + number)
    for p in params.values():
        p.grad = torch.randn(p.shape, generator=generator)
    optimizer.step()


def everything(params, optimizer):
    """Return copies of all parameters, states and groups."""
    return copy.deepcopy(([p.detach() for p in params.values()], optimizer.state_dict()))


# --- The ways in ---------------------------------------------------------------------------------


def load(params, optimizer, entries):
    saved = optimizer.state_dict()
    optimizer.load_state_dict({**saved, "state": {**saved["state"], 0: entries}})


def load_from_a_file(params, optimizer, entries):
    load(params, optimizer, through_file(entries))


def assign(params, optimizer, entries):
    optimizer.state[params["a"]] = entries


def assign_in_place(params, optimizer, entries):
    state = optimizer.state[params["a"]]
    for key in set(state) - set(entries):
        del state[key]
    state.update(entries)


def set_state(params, optimizer, entries):
    kept = optimizer.__getstate__()
    optimizer.__setstate__({**kept, "state": {**kept["state"], params["a"]: entries}})


LOADS = {"load": load, "load from a file": load_from_a_file}
ASSIGNMENTS = {"assign": assign, "assign in place": assign_in_place, "setstate": set_state}
WAYS = LOADS | ASSIGNMENTS


# --- What arrives --------------------------------------------------------------------------------


def with_format(position, *values):
    def change(entries):
        header = entries["format"].tolist()
        header[position : position + len(values)] = values
        return {"format": torch.tensor(header)}

    return change


def each(keys, change):
    return lambda entries: {key: change(entries[key]) for key in keys}


def shrunk(tensor):
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(3)
    return tensor


# What changes in the entries of "a": (64, 1000) in blocks of 256; and what the refusal says.
REFUSED = {
    f"blocks of {size}": (with_format(3, size), "block_size: got|exp_avg: missing")
    for size in (-(2**62), -1, 0, 1, 32, 63, 100, 8192, 65536, 2**31, 2**32, 2**62)
} | {
    # Blocks of 4096 are served, but one to a row is a quarter of the scales.
    "scales of other blocks": (with_format(3, 4096), "_scale: got 256 elements, expected 64"),
    "codec -1": (with_format(2, -1), "got codes -0x1"),
    "codecs that differ": (with_format(2, 0x0104), "got codes 0x104, expected one codec"),
    "codecs of three moments": (with_format(2, 0x040404), "got codes 0x40404, expected one"),
    "codec 0 with blocks": (with_format(2, 0), "codec number 0"),
    "version 2**40": (with_format(0, 2**40), "format version"),
    "negative shape": (with_format(5, -64, -1000), "shape"),
    "endless shape": (with_format(5, 2**62, 2**62), "shape|number of elements"),
    "more elements than int64": (with_format(5, 2**40, 2**40), "parameter has|number of elements"),
    "transposed": (with_format(5, 1000, 64), r"exp_avg_scale|moments of shape \(1000, 64\)"),
    "flat": (lambda e: {"format": e["format"][:6]}, "the parameter has|longer rows|expected"),
    "format cut": (lambda e: {"format": e["format"][:4]}, "format of a"),
    "format of floats": (each(["format"], torch.Tensor.float), "not a row of int64"),
    "format as a list": (each(["format"], torch.Tensor.tolist), "not a row of int64"),
    "format in two rows": (each(["format"], lambda t: t.view(1, 7)), "not a row of int64"),
    "format on meta": (each(["format"], lambda t: t.to("meta")), "format of a: got a tensor on"),
    "codes cut": (each(CODES, lambda t: t.view(-1)[:3]), "q8: got 3 elements, expected 64000"),
    "one code less": (each(CODES[:1], lambda t: t.view(-1)[:-1]), "got 63999 elements"),
    "one code more": (each(CODES[1:], lambda t: torch.cat([t.view(-1), t[0, :1]])), "got 64001"),
    "scales cut": (each(["exp_avg_scale"], lambda t: t[:1]), "exp_avg_scale: got 4 elements"),
    "roots cut": (each(["exp_avg_sq_scale"], lambda t: t[..., 0]), "exp_avg_sq_scale: got 256"),
    "all cut": (each(TENSORS, lambda t: t.reshape(-1)[:1]), "got 1 elements, expected"),
    "codes of signed bytes": (each(CODES, lambda t: t.view(torch.int8)), "dtype torch.int8"),
    "scales of integers": (
        each(["exp_avg_scale"], lambda t: t.view(torch.int32)),
        "dtype torch.int32",
    ),
    "codes on meta": (each(CODES, lambda t: t.to("meta")), "got a tensor on meta"),
    "scales on meta": (each(["exp_avg_scale"], lambda t: t.to("meta")), "got a tensor on meta"),
    "sparse codes": (each(CODES, torch.Tensor.to_sparse), "layout torch.sparse_coo"),
    "no codes": (each(CODES, lambda t: None), "got NoneType, expected a tensor"),
    "a number for codes": (each(CODES, lambda t: 1.0), "got float, expected a tensor"),
    "correction of float32": (lambda e: {"param_correction": torch.zeros(64, 1000)}, "correction"),
}  # fmt: skip
# Loads drop what cannot be: weight_correction_bits is 0 here.
FITTED_BY_LOADS = ("correction of float32",)


def refused_cases():
    for name in REFUSED:
        for way in WAYS:
            if not (way in LOADS and name in FITTED_BY_LOADS):
                yield name, way


@pytest.mark.parametrize(("name", "way"), list(refused_cases()))
def test_state_that_does_not_fit_is_refused_and_nothing_changes(name, way):
    change, message = REFUSED[name]
    params, optimizer = made()
    good = dict(optimizer.state[params["a"]])
    entries = {**copy.deepcopy(good), **change(copy.deepcopy(good))}
    before = everything(params, optimizer)
    if way in LOADS:
        with pytest.raises(ValueError, match=message):
            LOADS[way](params, optimizer, entries)
    else:
        ASSIGNMENTS[way](params, optimizer, entries)
        with pytest.raises(ValueError, match=message):
            step(params, optimizer, 1)
        assign(params, optimizer, good)
    assert difference(everything(params, optimizer), before) == ""
    twins, twin = made()
    for number in (1, 2):
        step(params, optimizer, number)
        step(twins, twin, number)
    assert difference(everything(params, optimizer), everything(twins, twin)) == ""


@pytest.mark.parametrize("key", TENSORS)
def test_state_whose_storage_shrank_is_refused(key):
    params, optimizer = made()
    entries = copy.deepcopy(optimizer.state[params["a"]])
    entries[key] = shrunk(entries[key])
    with pytest.raises(ValueError, match=f"{key}: got a storage of 3 bytes"):
        load(params, optimizer, entries)
    live = optimizer.state[params["a"]][key]
    live.untyped_storage().resize_(3)
    before = [p.detach().clone() for p in params.values()]
    with pytest.raises(ValueError, match=f"{key}: got a storage of 3 bytes"):
        step(params, optimizer, 1)
    assert difference([p.detach() for p in params.values()], before) == ""


def overlapping(entries, key, other, shift_bytes):
    """Return entries of which one lies `shift_bytes` after another's beginning, in its memory."""
    sizes = [entries[name].nbytes for name in (key, other)]
    memory = torch.zeros(shift_bytes + max(sizes) + 8, dtype=torch.uint8)
    views = {}
    for name, begin, size in ((key, 0, sizes[0]), (other, shift_bytes, sizes[1])):
        view = memory[begin : begin + size].view(entries[name].dtype)
        views[name] = view.view(entries[name].shape)
    return {**entries, **views}


OVERLAPS = [(*CODES, 0), (*CODES, 100), (*CODES, 63999), ("exp_avg_q8", "exp_avg_sq_scale", 4)]


@pytest.mark.parametrize("way", ASSIGNMENTS)
@pytest.mark.parametrize(("key", "other", "shift_bytes"), OVERLAPS)
def test_state_whose_entries_share_memory_is_refused(way, key, other, shift_bytes):
    params, optimizer = made()
    state = copy.deepcopy(optimizer.state[params["a"]])
    ASSIGNMENTS[way](params, optimizer, overlapping(state, key, other, shift_bytes))
    before = params["a"].detach().clone()
    with pytest.raises(ValueError, match="of a and .* of a share memory"):
        step(params, optimizer, 1)
    assert torch.equal(params["a"], before)


def test_state_that_shares_memory_with_its_parameter_is_refused():
    params, optimizer = made()
    with torch.no_grad():
        codes = params["a"].view(-1)[:16000].view(torch.uint8).view(64, 1000)
    optimizer.state[params["a"]]["exp_avg_q8"] = codes
    with pytest.raises(ValueError, match="exp_avg codes of a and the parameter of a share memory"):
        step(params, optimizer, 1)


@pytest.mark.parametrize("way", LOADS)
def test_loaded_state_whose_entries_share_memory_gets_memory_of_its_own(way):
    params, optimizer = made()
    state = overlapping(copy.deepcopy(optimizer.state[params["a"]]), *CODES, 100)
    LOADS[way](params, optimizer, state)
    twins, twin = made()
    load(twins, twin, {key: copy.deepcopy(value) for key, value in state.items()})
    step(params, optimizer, 1)
    step(twins, twin, 1)
    assert difference(everything(params, optimizer), everything(twins, twin)) == ""


@pytest.mark.parametrize("way", WAYS)
def test_state_of_one_value_expanded_is_fitted(way):
    """Tensors without strides of their own hold one element for all."""
    (params, optimizer), (twins, twin) = made(), made()
    state = optimizer.state[params["a"]]
    expanded = {key: state[key].view(-1)[:1].view(1, 1).expand(64, 1000) for key in CODES}
    WAYS[way](params, optimizer, {**state, **expanded})
    whole = {key: value.contiguous() for key, value in expanded.items()}
    load(twins, twin, {**state, **whole})
    for number in (1, 2):
        step(params, optimizer, number)
        step(twins, twin, number)
    assert difference(everything(params, optimizer), everything(twins, twin)) == ""


@pytest.mark.parametrize("way", ASSIGNMENTS)
def test_fp32_adam_state_by_assignment_is_the_one_that_is_loaded(way):
    (params, optimizer), (twins, twin) = made(), made()
    moments = {which: torch.ones(64, 1000) for which in ("exp_avg", "exp_avg_sq")}
    ASSIGNMENTS[way](params, optimizer, {"step": 1, **moments})
    load(twins, twin, {"step": torch.tensor(1.0), **moments})
    step(params, optimizer, 1)
    step(twins, twin, 1)
    assert difference(everything(params, optimizer), everything(twins, twin)) == ""


ON_META = torch.tensor(1.0, device="meta")


@pytest.mark.parametrize("value", [None, -1, 1.5, float("nan"), float("inf"), "x", 2**70, ON_META])
@pytest.mark.parametrize("way", LOADS)
def test_loaded_step_that_is_no_number_of_steps_is_refused(way, value):
    params, optimizer = made()
    before = everything(params, optimizer)
    entries = {**copy.deepcopy(optimizer.state[params["a"]]), "step": value}
    with pytest.raises(ValueError, match="state entry step: got"):
        LOADS[way](params, optimizer, entries)
    assert difference(everything(params, optimizer), before) == ""


@pytest.mark.parametrize("values", ["nan", "inf", "-inf", "-1", "3e38", "1e-45"])
@pytest.mark.parametrize("codec", ["log", "dynamic"])
def test_scales_of_any_value_are_stepped_over_in_their_own_memory(codec, values):
    """Blocks that are no numbers are counted; the kernel must survive the others, too."""
    p = torch.nn.Parameter(torch.randn(9, 300, generator=torch.Generator().manual_seed(1)))
    optimizer = zero8.Adam8bitBlockwise([p], codec=codec, min_8bit_size=1)
    p.grad = torch.ones_like(p)
    optimizer.step()
    for key in ("exp_avg_scale", "exp_avg_sq_scale"):
        optimizer.state[p][key].view(-1)[::2] = float(values)
    for key in CODES:
        optimizer.state[p][key].view(-1).copy_(torch.arange(2700) % 256)
    for _ in range(3):
        with suppress(FloatingPointError):
            optimizer.step()
    assert optimizer.state[p]["step"] == 4
    # In `log` they are beyond the codes on both ends.
    are_numbers = codec == "dynamic" and values in ("3e38", "1e-45")
    assert bool(optimizer.nonfinite_blocks) != are_numbers
    assert p.isfinite().all()
