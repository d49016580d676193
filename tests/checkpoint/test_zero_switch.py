# SPDX-License-Identifier: Apache-2.0
"""From fp32 Adams to 8 bits and back, in ZeRO stages 2 and 3 on two ranks."""

from functools import cache

import pytest
import torch
from convert_worker import settings, visit
from universal_cuts import check_moments, convert, convert_fp32, decoded, joined
from zero_worker import MOMENTS

# A first run also builds DeepSpeed's ops.
pytestmark = pytest.mark.timeout(1800)

STAGES = (2, 3)
# Which Adam DeepSpeed takes: (where the optimizer is, its section of the config).
ADAMS = {
    "torch": (None, {"optimizer": "AdamW", "torch_adam": True}),
    "DeepSpeedCPUAdam": ("cpu", {"optimizer": "AdamW"}),
}
OURS = (None, {})
CASES = [(stage, adam) for stage in STAGES for adam in ADAMS]
BEFORE, AFTER = (0, 1), (2,)


def config_of(stage, adam, universal):
    offload, options = ADAMS.get(adam, OURS)
    return settings(stage, offload, universal, **options)


@pytest.fixture(scope="module")
def switched(standing_ranks, tmp_path_factory):
    """Return a function: of a stage and an Adam, what ranks held by optimizer, and by way after."""

    @cache
    def of(stage, adam):
        folder = tmp_path_factory.mktemp("switch")

        def run(jobs):
            jobs = {key: {**job, "grouped": False} for key, job in jobs.items()}
            done = standing_ranks(2).run(visit, timeout_s=400, jobs=list(jobs.values()))
            return {key: [rank[number] for rank in done] for number, key in enumerate(jobs)}

        before = {
            one: {
                "ds_config": config_of(stage, one, universal=False),
                "steps": BEFORE,
                "target": f"{folder}/{one}",
            }
            for one in (adam, "ours")
        }
        saved = run(before)
        convert(f"{folder}/ours")
        convert_fp32(f"{folder}/{adam}")
        after = {
            way: {
                "ds_config": config_of(stage, into, universal),
                "source": f"{folder}/{source}",
                "steps": AFTER if into == "ours" else (),
            }
            for way, into, source, universal in (
                ("as it is", "ours", adam, False),
                ("by universal", "ours", adam, True),
                ("back", adam, "ours", True),
            )
        }
        return saved | run(after)

    return of


def parts(ours, theirs, entry):
    """Return by parameter what `theirs` hold of an entry in float32, in the places of `ours`."""
    made = {name: torch.zeros(len(e["weights"])) for name, e in joined(ours).items()}
    for mine, others in zip(ours, theirs, strict=True):
        for state, other in zip(mine["states"], others["states"], strict=True):
            for piece in state["pieces"]:
                here = other[entry][piece.start : piece.start + piece.numel]
                made[piece.name][piece.first : piece.first + piece.numel] = here
    return made


def moments_in(ours, theirs):
    m, v = (parts(ours, theirs, which) for which in MOMENTS)
    return {name: dict(zip(MOMENTS, (m[name], v[name]), strict=True)) for name in m}


def of_ranks(results, when):
    return [result[when] for result in results]


def steps_of(ranks):
    return {int(state["step"]) for rank in ranks for state in rank["states"]}


@pytest.mark.slow
@pytest.mark.parametrize("way", ["as it is", "by universal"])
@pytest.mark.parametrize(("stage", "adam"), CASES)
def test_fp32_adam_goes_on_in_8_bits_within_half_a_code(switched, stage, adam, way):
    """`engine.load_checkpoint` reads both, the other's own checkpoint and a universal one."""
    found = switched(stage, adam)
    ours, theirs = of_ranks(found[way], "loaded"), of_ranks(found[adam], "stepped")
    held = joined(ours)
    assert steps_of(ours) == {len(BEFORE)}
    for name, master in parts(ours, theirs, "master").items():
        assert torch.equal(held[name]["weights"], master), name
    assert steps_of(of_ranks(found[way], "stepped")) == {len(BEFORE + AFTER)}
    check_moments(moments_in(ours, theirs), held)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "adam"), CASES)
def test_8_bits_go_on_in_an_fp32_adam_exactly(switched, stage, adam):
    found = switched(stage, adam)
    ours, theirs = of_ranks(found["ours"], "stepped"), of_ranks(found["back"], "loaded")
    assert steps_of(theirs) == {len(BEFORE)}
    held = joined(ours)
    for name, master in parts(ours, theirs, "master").items():
        assert torch.equal(held[name]["weights"], master), name
    for name, moments in moments_in(ours, theirs).items():
        for which, got in moments.items():
            assert torch.equal(decoded(held[name], which), got), (name, which)
