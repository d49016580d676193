# SPDX-License-Identifier: Apache-2.0
"""What changes from step to step in records that are kept."""

import numpy as np
import pytest

from zero8.op import kernel
from zero8.op.structs import KEPT_PIECE, MAX_MOMENTS, SEGMENT
from zero8.spec import dither

STEPS = [1, 31, 32, 33, 63, 64, 1000, 2**31 - 1, 2**31, 2**32 + 5, 2**40 + 17, 2**61]
KEYS = [0, 1, 0xC13FA9A9, 2**31, 2**32 - 1]


def fill(records, pieces, addresses, which, steps):
    kernel.module().fill(records, pieces, addresses.reshape(-1), which, steps)


def kept(owners, keys=((3, 4),)):
    pieces = np.zeros(len(owners), KEPT_PIECE)
    pieces["owner"] = owners
    pieces["param_offset"] = 4 * np.arange(len(owners))
    pieces["grad_offset"] = 2 * np.arange(len(owners))
    moment_keys, pieces["param_key"] = np.resize(keys, (len(owners), 2)).T
    pieces["moment_keys"] = np.stack([moment_keys] * MAX_MOMENTS, axis=1)
    return pieces


@pytest.mark.parametrize("step", STEPS)
def test_fill_phases_are_those_of_the_definition(step):
    pairs = [(a, b) for a in KEYS for b in KEYS]
    pieces = kept([0] * len(pairs), pairs)
    records = np.zeros(len(pairs), SEGMENT)
    addresses = np.array([[1000], [2000]], np.uint64)
    fill(records, pieces, addresses, np.zeros(1, np.int64), np.array([step], np.int64))
    for record, (moment, param) in zip(records, pairs, strict=True):
        assert (record["moments"]["phase"] == dither.phase_of(moment, step)).all()
        assert record["param_phase"] == dither.phase_of(param, step)


def test_fill_gives_each_piece_what_is_its_parameters():
    pieces, steps = kept([0, 0, 2, 1]), np.array([5, 40], np.int64)
    records = np.zeros(4, SEGMENT)
    records["nonfinite_blocks"], records["moments"]["codec"] = 7, 3
    addresses = np.array([[1000, 2000, 3000], [10_000, 20_000, 2**63]], np.uint64)
    fill(records, pieces, addresses, np.array([1, 0, 1], np.int64), steps)
    assert records["param"].tolist() == [1000, 1004, 3008, 2012]
    assert records["grad"].tolist() == [10_000, 10_002, 2**63 + 4, 20_006]
    assert records["scalars"].tolist() == [1, 1, 1, 0]
    of_step = [dither.phase_of(3, int(step)) for step in steps[records["scalars"]]]
    assert records["moments"]["phase"].tolist() == [[one] * MAX_MOMENTS for one in of_step]
    assert not records["nonfinite_blocks"].any() and (records["moments"]["codec"] == 3).all()


BAD = {
    "an owner that is not there": dict(owners=[0, 2]),
    "an owner below 0": dict(owners=[-1, 0]),
    "a step that is not there": dict(which=[0, 1]),
    "a step below 0": dict(which=[0, -1]),
    "addresses of others": dict(params=3),
    "records of others": dict(segments=1),
}


@pytest.mark.parametrize("name", BAD)
def test_fill_of_what_does_not_belong_together_raises_and_writes_nothing(name):
    case = dict(owners=[0, 1], which=[0, 0], params=2, segments=2) | BAD[name]
    records = np.ones(case["segments"], SEGMENT)
    before = records.copy()
    addresses = np.ones((2, case["params"]), np.uint64)
    with pytest.raises(ValueError, match="records of other parameters than step"):
        which, steps = np.array(case["which"], np.int64), np.array([5], np.int64)
        fill(records, kept(case["owners"]), addresses, which, steps)
    assert records.tobytes() == before.tobytes()
