# SPDX-License-Identifier: Apache-2.0
"""States that did not come from a step: each is fitted to its parameter or refused, and then the
kernel touches nothing.  test_sanitized.py runs this again with the sanitizers watching.
"""

import copy
from contextlib import suppress
from functools import partial

import pytest
import torch
from nests import assert_same
from small_optimizers import param, run, set_grads, through_file

import zero8

pytestmark = pytest.mark.usefixtures("one_torch_thread")
SHAPES = {"a": (64, 1000), "b": (33,), "c": (70, 300)}
CODES = ("exp_avg_q8", "exp_avg_sq_q8")
MOMENTS = ("exp_avg", "exp_avg_sq")
TENSORS = (*CODES, "exp_avg_scale", "exp_avg_sq_scale")
META = torch.device("meta")


def made():
    params = {name: param(*shape, seed=1) for name, shape in SHAPES.items()}
    optimizer = zero8.Adam8bitBlockwise(list(params.items()), lr=1e-2)
    run(optimizer, params.values(), 1)
    return params, optimizer


def everything(params, optimizer):
    """Return copies of all parameters, states and groups."""
    return copy.deepcopy(([p.detach() for p in params.values()], optimizer.state_dict()))


def assert_steps_are_those_of(ours, theirs):
    for number in (1, 2):
        for params, optimizer in (ours, theirs):
            run(optimizer, params.values(), 1, start=number)
    assert_same(everything(*ours), everything(*theirs))


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
    state.clear()
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


# What changes in the entries of "a": (64, 1000) in blocks of 256; and what the refusal says.
REFUSED = {
    f"blocks of {size}": (with_format(3, size), "block_size: got|exp_avg: missing")
    for size in (-(2**62), -1, 0, 1, 32, 63, 100, 8192, 65536, 2**31, 2**32, 2**62)
} | {
    # Blocks of 4096 are served, but one to a row is a quarter of the scales.
    "scales of other blocks": (with_format(3, 4096), "_scale: got 256 elements, expected 64"),
    "codec 99": (with_format(2, 99 * 0x101), "codec number 99 is unknown"),
    "codecs that differ": (with_format(2, 0x0104), "got codes 0x104, expected one codec"),
    "codec 0 with blocks": (with_format(2, 0), "codec number 0"),
    "algorithm 7": (with_format(1, 7), "algorithm 7"),
    "version 2**40": (with_format(0, 2**40), "format version"),
    "negative shape": (with_format(5, -64, -1000), "shape"),
    "endless shape": (with_format(5, 2**62, 2**62), "shape|number of elements"),
    "more elements than int64": (with_format(5, 2**40, 2**40), "parameter has|number of elements"),
    "transposed": (with_format(5, 1000, 64), r"exp_avg_scale|moments of shape \(1000, 64\)"),
    "flat": (lambda e: {"format": e["format"][:6]}, "the parameter has|longer rows|expected"),
    "format cut": (lambda e: {"format": e["format"][:4]}, "format of a"),
    "format of zeros": (each(["format"], torch.zeros_like), r"zeros.*optimizer\.state\.clear\(\)"),
    "format of 10^5": (lambda e: {"format": torch.ones(10**5).long()}, "got 100000 numbers"),
    "format of floats": (each(["format"], torch.Tensor.float), "not a row of int64"),
    "format in two rows": (each(["format"], lambda t: t.view(1, 7)), "not a row of int64"),
    "codes cut": (each(CODES, lambda t: t.view(-1)[:3]), "q8: got 3 elements, expected 64000"),
    "one code less": (each(CODES[:1], lambda t: t.view(-1)[:-1]), "got 63999 elements"),
    "scales cut": (each(["exp_avg_scale"], lambda t: t[:1]), "exp_avg_scale: got 4 elements"),
    "roots cut": (each(["exp_avg_sq_scale"], lambda t: t[..., 0]), "exp_avg_sq_scale: got 256"),
    "all cut": (each(TENSORS, lambda t: t.reshape(-1)[:1]), "got 1 elements, expected"),
    "codes of signed bytes": (each(CODES, lambda t: t.view(torch.int8)), "dtype torch.int8"),
    "scales of integers": (each(TENSORS[2:3], lambda t: t.view(torch.int32)), "dtype torch.int32"),
    "codes on meta": (each(CODES, lambda t: t.to(META)), "got a tensor on meta"),
    "sparse codes": (each(CODES, torch.Tensor.to_sparse), "layout torch.sparse_coo"),
    "no codes": (each(CODES, lambda t: None), "got NoneType, expected a tensor"),
    "a number for codes": (each(CODES, lambda t: 1.0), "got float, expected a tensor"),
}  # fmt: skip


def check_refused(params, optimizer, arrive, use, message):
    """Check that a use of what arrives is refused, and that all is as it was without it."""
    good = dict(optimizer.state[params["a"]])
    before = everything(params, optimizer)
    if arrive is not None:
        arrive()
        set_grads(params.values(), 1)
    with pytest.raises(ValueError, match=message) as raised:
        use()
    assert len(str(raised.value)) < 1000
    assign(params, optimizer, good)
    assert_same(everything(params, optimizer), before)
    assert_steps_are_those_of((params, optimizer), made())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", REFUSED)
def test_state_that_does_not_fit_is_refused_and_nothing_changes(name, way):
    change, message = REFUSED[name]
    params, optimizer = made()
    entries = copy.deepcopy(optimizer.state[params["a"]])
    entries |= change(entries)
    arrives = (lambda: WAYS[way](params, optimizer, entries)), optimizer.step
    arrive, use = arrives if way in ASSIGNMENTS else (None, arrives[0])
    check_refused(params, optimizer, arrive, use, message)


# Moments and a step that other code assigns beside the codes.
ASSIGNED = {
    "another shape": ({"exp_avg": torch.zeros(1000, 64)}, r"got moments of shape \(1000, 64\)"),
    "flat": ({"exp_avg": torch.zeros(64000)}, r"got moments of shape \(64000,\)"),
    "NaN": ({"exp_avg": torch.full(SHAPES["a"], torch.nan)}, "exp_avg of a: got .* not finite"),
    "inf": ({"exp_avg_sq": torch.full(SHAPES["a"], torch.inf)}, "not finite"),
    "negative": ({"exp_avg_sq": -torch.ones(SHAPES["a"])}, "exp_avg_sq of a: got a negative value"),
    "integers": ({"exp_avg": torch.zeros(SHAPES["a"]).long()}, "got dtype torch.int64"),
    "None": ({"exp_avg": None}, "exp_avg of a: got NoneType, expected a tensor"),
    "a step of -1": ({"step": torch.tensor(-1.0)}, "step: got"),
}


@pytest.mark.parametrize("name", ASSIGNED)
@pytest.mark.parametrize("read", ["step", "state_dict", "memory_report"])
def test_moment_assigned_that_does_not_fit_raises_and_changes_nothing(name, read):
    params, optimizer = made()
    given, message = ASSIGNED[name]
    whole = {**optimizer.state[params["a"]], "exp_avg": torch.zeros(SHAPES["a"]), **given}
    arrive = partial(assign, params, optimizer, whole)
    check_refused(params, optimizer, arrive, getattr(optimizer, read), message)


def entry(key, value):
    return lambda saved: saved["state"][0].update({key: value})


def changed(key, change):
    return lambda saved: saved["state"][0].update({key: change(saved["state"][0][key])})


def without(key):
    return lambda saved: saved["state"][0].pop(key)


def setting(key, value):
    return lambda saved: saved["param_groups"][0].update({key: value})


def state(key, value):
    return lambda saved: saved["state"].update({key: value})


def of_adam(values, shape=SHAPES["a"]):
    """Return what makes the first state one of an fp32 Adam, with these values in both moments."""
    return state(0, {"step": 3, **{which: values.expand(shape) for which in MOMENTS}})


LAUGHS = ["ha"] * 10
for _ in range(9):
    LAUGHS = [LAUGHS] * 10

# What changes in a state dict.
UNLOADED = {
    f"a step of {value}": (entry("step", value), "state entry step: got")
    for value in (None, -1, 1.5, torch.nan, torch.inf, "x", 2**70, torch.ones((), device=META))
} | {
    "no step": (without("step"), "step"),
    "no history": (without("history"), "history"),
    "no format": (without("format"), "without .*exp_avg"),
    "no codes": (without("exp_avg_sq_q8"), "exp_avg_sq_q8: missing"),
    "no scales": (without("exp_avg_scale"), "exp_avg_scale: missing"),
    "a scale of NaN": (
        changed("exp_avg_scale", lambda s: s * torch.nan),
        "exp_avg of .*: got a scale that is not finite",
    ),
    "v below zero": (
        changed("exp_avg_sq_scale", torch.Tensor.neg),
        "exp_avg_sq of .*: got a negative scale",
    ),
    "a code that there is not": (
        changed("exp_avg_q8", lambda c: torch.full_like(c, 128)),
        "exp_avg of .*: got a code that is NaN or unused: 128",
    ),
    "infinite history": (entry("history", float("inf")), "history: got"),
    "one parameter less": (
        lambda saved: saved["param_groups"][0]["params"].pop(),
        "size|length|parameter",
    ),
    "lr of NaN": (setting("lr", float("nan")), "lr: got nan"),
    "beta2 above 1": (setting("betas", (0.9, 1.5)), "betas: got 1.5"),
    "a step of laughs": (entry("step", LAUGHS), "step: got a value of type list"),
    "a step of 5000 digits": (entry("step", 10**5000), "step: got an integer of 16610 bits"),
    "an entry whose key is a number": (state(0, {1: 2, "step": 3}), r"got entries \['step', 1\]"),
    "a state of None": (state(0, None), "states that are not dicts"),
    "a state of nobody": (state(99, {"exp_avg_q8": 0}), r"states of \[99\]"),
    "one of bitsandbytes": (state(0, {"step": 3, "state1": 1}), "zero8 checkpoint convert IN OUT"),
    "moments of float8": (
        of_adam(torch.ones(1).to(torch.float8_e4m3fn)),
        "got dtype torch.float8_e4m3fn",
    ),
    "moments of 1e300": (of_adam(torch.tensor([1e300]).double()), "float32 does not hold"),
    "moments of another model": (
        of_adam(torch.ones(1), (64, 999)),
        r"of shape \(64, 999\), .*\(64, 1000\)",
    ),
    "names of numbers": (setting("param_names", [1, 2, 3]), "param_names: got a value"),
    "lr of laughs": (setting("lr", LAUGHS), "lr: got a value of type list"),
    "lr on meta": (setting("lr", torch.ones((), device=META)), "lr: got a tensor"),
    "amsgrad": (setting("amsgrad", True), "amsgrad: got True"),
    "amsgrad of a tensor": (setting("amsgrad", torch.ones(2)), "amsgrad: got a value"),
}


@pytest.mark.parametrize("name", UNLOADED)
def test_state_dict_with_what_no_save_writes_is_refused_and_nothing_changes(name):
    change, message = UNLOADED[name]
    params, optimizer = made()
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 7.0
    change(saved)
    use = partial(optimizer.load_state_dict, saved)
    check_refused(params, optimizer, None, use, message)


@pytest.mark.parametrize("key", TENSORS)
def test_state_whose_storage_shrank_is_refused(key):
    params, optimizer = made()
    entries = copy.deepcopy(optimizer.state[params["a"]])
    entries[key].untyped_storage().resize_(3)
    before = [p.detach().clone() for p in params.values()]
    with pytest.raises(ValueError, match=f"{key}: got a storage of 3 bytes"):
        load(params, optimizer, entries)
    optimizer.state[params["a"]][key].untyped_storage().resize_(3)
    with pytest.raises(ValueError, match=f"{key}: got a storage of 3 bytes"):
        run(optimizer, params.values(), 1)
    assert_same([p.detach() for p in params.values()], before)


# --- Memory that is shared -----------------------------------------------------------------------


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
@pytest.mark.parametrize("overlap", [*OVERLAPS, None])
def test_state_whose_entries_share_memory_is_refused(way, overlap):
    params, optimizer = made()
    state = copy.deepcopy(optimizer.state[params["a"]])
    if overlap is None:  # with the parameter
        codes = params["a"].detach().view(-1)[:16000].view(torch.uint8).view(64, 1000)
        state["exp_avg_q8"] = codes
    else:
        state = overlapping(state, *overlap)
    ASSIGNMENTS[way](params, optimizer, state)
    before = params["a"].detach().clone()
    with pytest.raises(ValueError, match="of a and .* of a share memory"):
        run(optimizer, params.values(), 1)
    assert torch.equal(params["a"], before)


# --- What is fitted ------------------------------------------------------------------------------


def fitted(name, state):
    """Return entries that arrive, and those that they are to be taken for."""
    if name == "entries that share memory":
        given = overlapping(copy.deepcopy(state), *CODES, 100)
        return given, copy.deepcopy(given)
    if name == "one value expanded":
        expanded = {key: state[key].view(-1)[:1].view(1, 1).expand(64, 1000) for key in CODES}
        return {**state, **expanded}, {**state, **{k: v.contiguous() for k, v in expanded.items()}}
    if name == "an fp32 Adam's":
        moments = {which: torch.ones(64, 1000) for which in MOMENTS}
        return {"step": 1, **moments}, {"step": torch.tensor(1.0), **moments}
    # Loads drop corrections: weight_correction_bits is 0 here.
    return {**state, "param_correction": torch.zeros(64, 1000)}, state


FITTED = {
    "entries that share memory": LOADS,
    "one value expanded": WAYS,
    "an fp32 Adam's": ASSIGNMENTS,
    "a correction": LOADS,
}


@pytest.mark.parametrize(("name", "way"), [(name, way) for name in FITTED for way in FITTED[name]])
def test_state_that_arrives_in_another_form_is_fitted(name, way):
    ours, theirs = made(), made()
    given, expected = fitted(name, ours[1].state[ours[0]["a"]])
    expected = {key: copy.deepcopy(value) for key, value in expected.items()}
    WAYS[way](*ours, given)
    load(*theirs, expected)
    assert_steps_are_those_of(ours, theirs)


@pytest.mark.parametrize("values", ["nan", "inf", "-inf", "-1", "3e38", "1e-45"])
@pytest.mark.parametrize("codec", ["log", "dynamic"])
def test_scales_of_any_value_are_stepped_over_in_their_own_memory(codec, values):
    """Blocks that are no numbers are counted; the kernel must survive the others, too."""
    p = param(9, 300, seed=1)
    optimizer = zero8.Adam8bitBlockwise([p], codec=codec, min_8bit_size=1)
    run(optimizer, [p], 1)
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
