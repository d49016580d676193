# SPDX-License-Identifier: Apache-2.0
"""Files made to harm whoever reads them: each gets an error that names it, at once, for nothing.

All are read in one process of its own, which says how each went; crashes and hangs are seen there.
"""

import json

import pytest
from crafted_cases import (
    CASES,
    dcp_folder,
    floats,
    metadata,
    with_codes,
    with_moments,
)
from crafted_files import tensor, value
from fragments import fragments_in

from zero8.spec.adam import UNKNOWN_HISTORY

MAX_SECONDS = 2.0


@pytest.fixture(scope="module")
def results(forks):
    done = forks.run("import crafted_cases; crafted_cases.work()", OMP_NUM_THREADS="1")
    found = dict(map(json.loads, done.stdout.splitlines()))
    died = {"error": f"died with status {done.returncode}: {done.stderr[-500:]}"}
    return {case: found.get(case, died) for case in CASES}


@pytest.mark.parametrize("case", CASES)
def test_crafted_file_gets_an_error_with_its_name_at_once(results, case):
    result = results[case]
    assert result["error"] == "ok", result
    assert result["names it"], result
    assert result["s"] < MAX_SECONDS, result
    assert result["effects"] == []


def test_good_files_of_the_same_make_are_read(tmp_path):
    """Otherwise they would be refused for what is not meant."""
    (tmp_path / "adam.pt").write_bytes(with_moments(tensor(floats(), [256], [1])))
    (fragment,) = fragments_in(tmp_path / "adam.pt")
    assert (fragment.step, fragment.memory) == (1, {"history": UNKNOWN_HISTORY})
    (tmp_path / "ours.pt").write_bytes(with_codes("step", value(7)))
    (fragment,) = fragments_in(tmp_path / "ours.pt")
    assert (fragment.step, fragment.piece.is_quantized) == (7, True)
    dcp_folder(tmp_path / "dcp", metadata())
    (fragment,) = fragments_in(tmp_path / "dcp")
    assert fragment.stores[0].table.numel == 256
