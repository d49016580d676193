# SPDX-License-Identifier: Apache-2.0
"""Whoever resumes from a checkpoint of zero8 0.1.0 gets the bits that 0.1.0 would have got.

`tests/golden/write_format2.py` says how the files were written; test_golden.py decodes others.
"""

import pytest
from format2_files import EXPECTED, differences, unpacked
from format2_runs import ALL, RANKS_RUNS, RUNS, go_on
from places import GOLDEN

ARCHIVES = sorted((GOLDEN / "format2").glob("*.tar.xz"))


@pytest.mark.usefixtures("one_torch_thread")
@pytest.mark.parametrize("name", RUNS)
def test_run_of_format_2_resumed_goes_on_with_the_same_bits(tmp_path, name):
    got = [go_on(name, unpacked(RUNS[name].saved, tmp_path))]
    assert differences(got, EXPECTED[name]) == []


@pytest.mark.parametrize(
    "name",
    [
        name if "test_golden" in name else pytest.param(name, marks=pytest.mark.slow)
        for name in RANKS_RUNS
    ],
)
def test_run_of_format_2_resumed_on_ranks_goes_on_with_the_same_bits(
    standing_ranks, tmp_path, name
):
    run = RANKS_RUNS[name]
    path = unpacked(run.saved, tmp_path)
    got = standing_ranks(run.world_size).run(go_on, name=name, path=path)
    assert differences(got, EXPECTED[name]) == []


def test_every_golden_archive_of_format_2_is_resumed_by_a_run():
    assert {path.name.partition(".")[0] for path in ARCHIVES} <= {run.saved for run in ALL.values()}
    assert EXPECTED.keys() == ALL.keys()
