# SPDX-License-Identifier: Apache-2.0
"""Muon under FSDP2: steps of one process, checkpoints, and gradients that are not finite."""

import math

import pytest
import torch
from fsdp_worker import whole
from muon_sharded import by_rows, resumed, run, sharded, through
from muon_worker import LATE, OPTIONS, SHAPES, STEPS, Known, alone, optimizer_of, results, wrong
from nests import assert_same, difference
from params import each
from ranks import error_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from examples.gpt.engines import join_ranks
from zero8.optimizer import muon_step as muon
from zero8.optimizer.muon import Muon8bitBlockwise

sizes = pytest.mark.parametrize(
    "world_size", [1, 2, pytest.param(3, marks=pytest.mark.slow)], ids=str
)


def trained(**options) -> dict[str, dict]:
    """Return `results` after some steps; with `by_rows`, two experts are gathered at once."""
    before, late = muon.MAX_NUMEL, options.pop("late", "")
    if options.pop("by_rows", False):
        muon.MAX_NUMEL = 2 * math.prod(SHAPES["experts"][1:])
        options["placement_of"] = by_rows
    try:
        model = sharded(**options)
        optimizer = optimizer_of(model)
        run(model, optimizer, 0, STEPS, late)
        return results(model, optimizer)
    finally:
        muon.MAX_NUMEL = before


DTYPES = {"a": "bfloat16", "conv": "bfloat16", "b": "float32", "experts": "float32"}


def trained_in_two_dtypes(is_alone: bool = False) -> dict[str, torch.Tensor]:
    """Return the values of matrices of two groups, which are orthogonalized in other dtypes."""
    torch.set_num_threads(1)
    model = Known() if is_alone else sharded()
    groups = [
        {"params": [(n, getattr(model, n)) for n in DTYPES if DTYPES[n] == one], "ns_dtype": one}
        for one in ("bfloat16", "float32")
    ]
    optimizer = Muon8bitBlockwise(groups, **{**OPTIONS, "ns_dtype": "auto"})
    for step in range(2):
        model(step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: whole(getattr(model, name).detach()) for name in DTYPES}


def poisoned(name: str) -> dict:
    """Return results before and after a step in which one rank's first element is NaN."""
    model = sharded()
    optimizer = optimizer_of(model)
    run(model, optimizer, 0, 2)
    before = results(model, optimizer)
    model(2).backward()
    if torch.distributed.get_rank() == 0:
        getattr(model, name).grad.to_local().view(-1)[0] = torch.nan
    error = error_of(optimizer.step) or error_of(optimizer.check_finite)
    optimizer.zero_grad()
    return {
        "error": error,
        "blocks": optimizer.nonfinite_blocks,
        "before": before,
        "after": results(model, optimizer),
        "next": error_of(run, model, optimizer, 3, 4),
    }


def made_on_two_dimensions() -> tuple[str, str] | None:
    mesh = init_device_mesh(join_ranks().type, (1, 1), mesh_dim_names=("rows", "columns"))
    p = distribute_tensor(torch.zeros(8, 512), mesh, [Shard(0), Shard(1)])
    return error_of(Muon8bitBlockwise, [("weight", nn.Parameter(p))])


STEPPED = {
    "one rank": (1, {}),
    "two ranks": (2, {}),
    "three ranks": (3, {}),
    "experts cut": (2, {"by_rows": True}),
    "replicas": (4, {"replicas": 2}),  # HSDP: each exchanges among its own ranks
    # The rounds of the first step have a parameter less; and parameters may be offloaded.
    "late gradient": (2, {"late": LATE, "offload": True}),
}


@each(STEPPED, [name for name in STEPPED if STEPPED[name][0] > 2])
def test_fsdp2_muon_steps_are_those_of_one_process(name, standing_ranks):
    world_size, options = STEPPED[name]
    expected = alone(late=options.get("late", ""))
    for got in standing_ranks(world_size).run(trained, **options):
        assert wrong(got, expected) == []


@pytest.mark.usefixtures("one_torch_thread")
def test_fsdp2_muon_groups_are_orthogonalized_in_their_own_dtypes(standing_ranks):
    """As in one process, to the bit."""
    expected = trained_in_two_dtypes(is_alone=True)
    for got in standing_ranks(2).run(trained_in_two_dtypes):
        assert difference(got, expected) == ""


@sizes
def test_fsdp2_muon_resumes_with_the_same_bits(world_size, standing_ranks, tmp_path):
    ranks = standing_ranks(world_size)
    expected = ranks.run(through, folder=tmp_path)
    for ours, theirs in zip(ranks.run(resumed, folder=tmp_path), expected, strict=True):
        assert difference(ours, theirs) == ""


def test_fsdp2_muon_checkpoint_of_two_ranks_resumes_on_one(standing_ranks, tmp_path):
    """No block is cut; so the loaded states are the same, and the momentum that follows."""
    (saved, later, _), _ = standing_ranks(2).run(through, folder=tmp_path)
    ((loaded, later_here, got),) = standing_ranks(1).run(resumed, folder=tmp_path)
    assert_same(loaded, saved)
    assert_same(later_here, later)
    assert wrong(got, alone(4)) == []


def test_fsdp2_muon_of_matrices_cut_in_two_dimensions_raises_at_once(standing_ranks):
    ((kind, text),) = standing_ranks(1).run(made_on_two_dimensions)
    assert kind == "ValueError"
    assert text.startswith(
        "got a matrix sharded as (Shard(dim=0), Shard(dim=1)), over 2 dimensions"
    )


@pytest.mark.parametrize("name", ["a", "b"])
@sizes
def test_fsdp2_muon_gradient_that_is_not_finite_leaves_its_matrix_on_all_ranks(
    name, world_size, standing_ranks
):
    """On the other ranks nothing but the matrix that they get is not finite."""
    expected = alone()
    for rank in standing_ranks(world_size).run(poisoned, name=name):
        kind, text = rank["error"]
        assert kind == "FloatingPointError" and name in text and rank["blocks"] > 0
        before, after = rank["before"], rank["after"]
        assert torch.equal(after[name]["values"], before[name]["values"])
        (m,), (m_before,), (m_clean,) = (one[name]["moments"] for one in (after, before, expected))
        m, m_before, m_clean = (x.view(-1) for x in (m, m_before, m_clean))
        assert torch.equal(m[:256], m_before[:256]) and torch.equal(m[256:], m_clean[256:])
        others = {key: value for key, value in after.items() if key != name}
        assert wrong(others, {key: expected[key] for key in others}) == []
        assert rank["next"] is None
