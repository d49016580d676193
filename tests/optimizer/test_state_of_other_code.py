# SPDX-License-Identifier: Apache-2.0
"""What other code puts into `optimizer.state`: moments, entries of its own, keys of its own.

Where torch.optim.AdamW takes it too, the same assertions run over both.
"""

import copy
import pickle

import pytest
import torch
from nests import assert_same
from small_optimizers import param, required_by, run, through_file

import zero8
from zero8 import Adam8bitBlockwise
from zero8.optimizer.elementwise import OPTIMIZERS
from zero8.spec.codec import CODECS

pytestmark = pytest.mark.usefixtures("one_torch_thread")
FP32, BF16 = torch.float32, torch.bfloat16
dtypes = pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda both: pickle.loads(pickle.dumps(both))}


# --- Moments of other code -----------------------------------------------------------------------

SHAPE = (24, 300)
classes = pytest.mark.parametrize("made", OPTIMIZERS, ids=lambda made: made.__name__)
both = pytest.mark.parametrize("made", [torch.optim.AdamW, Adam8bitBlockwise])


def stepped(made=Adam8bitBlockwise, shape=SHAPE, dtype=FP32, steps=2, **keywords):
    """Return a parameter and its optimizer after two steps."""
    p = param(*shape, dtype=dtype)
    required = required_by(made) if made in OPTIMIZERS else {}
    optimizer = made([p], lr=0.01, weight_decay=0.0, **required, **keywords)
    run(optimizer, [p], steps)
    return p, optimizer


READERS = {
    "step": lambda optimizer: optimizer,
    "state_dict": lambda optimizer: optimizer.state_dict() and optimizer,
    "memory_report": lambda optimizer: optimizer.memory_report() and optimizer,
    **COPIES,
}
ASSIGNED = {
    **{made.__name__: {"made": made} for made in OPTIMIZERS},
    **{read: {"read": read} for read in READERS},
    **{codec: {"codec": codec, "only": "exp_avg_sq"} for codec in CODECS},
    **{
        f"{dtype} {shape}": {"of": dtype, "shape": shape}
        for dtype in (torch.float64, BF16, torch.float16)
        for shape in (SHAPE, (50,), (2048, 4))
    },
    "channels_last": {"shape": (16, 8, 8, 8), "format": torch.channels_last},
}


@pytest.mark.parametrize("case", ASSIGNED.values(), ids=ASSIGNED)
def test_moments_assigned_beside_codes_count_as_loaded_ones(case):
    """Nothing of them stays, and steps go on."""
    p, optimizer = stepped(**{k: case[k] for k in ("made", "codec", "shape") if k in case})
    form = {"memory_format": case.get("format", torch.contiguous_format)}
    p.data = p.data.to(**form)
    names = optimizer.algorithm_of(optimizer.param_groups[0]).moment_names
    names = [case["only"]] if "only" in case else names
    values = [param(*p.shape, seed=s).detach().abs().to(case.get("of")) for s in range(len(names))]
    given = {name: value.to(**form) for name, value in zip(names, values, strict=True)}
    q, twin = copy.deepcopy((p, optimizer))
    saved = copy.deepcopy(zero8.export(twin))
    saved["state"][0] |= given
    twin.load_state_dict(saved)
    keys = set(optimizer.state[p])
    optimizer.state[p].update({name: value.clone() for name, value in given.items()})
    optimizer = READERS[case.get("read", "step")](optimizer)
    (p,) = optimizer.param_groups[0]["params"]
    run(optimizer, [p], 2, start=7)
    run(twin, [q], 2, start=7)
    assert set(optimizer.state[p]) == keys
    assert torch.equal(p, q)
    assert_same(optimizer.state[p], twin.state[q])


# --- Entries and keys of other code --------------------------------------------------------------


def entries_for(p) -> dict:
    """Return entries of every kind; torch's load itself loses strings."""
    return {
        "slow": p.detach().clone() + 1,
        "counts": torch.arange(3),
        "last": torch.tensor(2.5, dtype=torch.float64),
        "nested": {"step": torch.tensor(7), "z": [torch.ones(2).double(), 3, None]},
        "every": 5,
        "on": True,
        "pair": (1, 2.5),
        "nothing": None,
    }


@both
@pytest.mark.parametrize("state_format", ["8bit", "fp32"])
@dtypes
@pytest.mark.parametrize("shape", [(50,), SHAPE, (2048, 4)], ids=str)
def test_entries_of_other_code_are_saved_and_load_as_torch_casts_them(
    made, state_format, dtype, shape
):
    keywords = {"state_dict_format": state_format} if made is Adam8bitBlockwise else {}
    p, optimizer = stepped(made, shape, dtype, **keywords)
    optimizer.state[p].update(entries_for(p))
    q, other = stepped(made, shape, dtype, **keywords)
    other.load_state_dict(through_file(optimizer.state_dict()))
    expected = entries_for(p)
    expected |= {key: expected[key].to(dtype) for key in ("counts", "last")}
    expected["nested"]["z"][0] = expected["nested"]["z"][0].to(dtype)
    assert_same({key: other.state[q][key] for key in expected}, expected)
    q.data = p.data.clone()
    for one, its in ((optimizer, p), (other, q)):
        run(one, [its], 2, start=7)
    # In fp32 the bound on updates, which can be reached by rounding, is not saved.
    assert torch.equal(p, q) if state_format == "8bit" else torch.allclose(p, q, atol=1e-3)
    assert_same({key: other.state[q][key] for key in expected}, expected)


@classes
def test_entries_before_the_first_step_stay_and_the_step_makes_the_moments(made):
    """Also those under names of other algorithms."""
    expected, (p, optimizer) = stepped(made), stepped(made, steps=0)
    theirs = {"slow": p.detach().clone().t(), "momentum_buffer_slow": torch.ones(3)}
    optimizer.state[p] |= theirs
    assert not optimizer.memory_report().rows
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved["state"][0].keys() == theirs.keys()
    optimizer.load_state_dict(saved)
    optimizer = copy.deepcopy(optimizer)
    (p,) = optimizer.param_groups[0]["params"]
    run(optimizer, [p], 2)
    assert torch.equal(p, expected[0])
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert_same({key: optimizer.state[p].pop(key) for key in theirs}, theirs)
    assert_same(optimizer.state[p], expected[1].state[expected[0]])
