# SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed's own tests ask of an optimizer's states, asked of ours.

`conformance_worker.BEHAVIOURS` is the table.
"""

import pytest
from conformance_worker import BEHAVIOURS, run_cases

# A first run also builds DeepSpeed's ops; a build that is interrupted leaves a lock behind.
pytestmark = pytest.mark.timeout(1800)

CASES = [(layout, name) for name, behaviour in BEHAVIOURS.items() for layout in behaviour.layouts]
QUICK_NAMES = ("full_state_set", "groups_state_get", "loaded_state_get", "other_entries", "to_fp32")
QUICK = [
    case
    for case in CASES
    if case[0] in ("zero2 offload", "zero3 offload") and case[1] in QUICK_NAMES
]
SLOW = [case for case in CASES if case not in QUICK]


@pytest.fixture(scope="module")
def results(standing_ranks, tmp_path_factory):
    """Return what runs some of the cases in one pair of processes, and only once."""
    found = {}

    def of(cases):
        if cases[0] not in found:
            folder = str(tmp_path_factory.mktemp("conformance"))
            found.update(
                standing_ranks(2).run(run_cases, timeout_s=900, cases=cases, folder=folder)[0]
            )
        return found

    return of


@pytest.mark.parametrize("case", QUICK, ids="-".join)
def test_conformance_of_representative_behaviours(results, case):
    assert results(QUICK)[case] is None, BEHAVIOURS[case[1]].line


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW, ids="-".join)
def test_conformance(results, case):
    assert results(SLOW)[case] is None, BEHAVIOURS[case[1]].line
