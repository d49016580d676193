# SPDX-License-Identifier: Apache-2.0
"""Conversions between frameworks: what is verbatim, what is within half a code, what goes on.

The gradients of `convert_model` are the same numbers in every framework, at 1, 2 and 3 ranks, so
that a training that was never converted is one of one process, except in blocks that a shard
boundary cut.
"""

import math

import pytest
import torch
from convert_cases import (
    MOMENTS,
    SOURCES,
    STAGES,
    WORLDS,
    ZERO,
    check,
    pieces_of,
    same,
    trained_names,
    uncut,
)
from convert_model import SAVED_AFTER, SHAPES, STEPS, Mixed, named_groups, results, run
from convert_worker import load_dcp, settings, visit
from fragments import fragments_in
from universal_cuts import check_within_half_a_code, decoded, joined

from zero8 import Adam8bitBlockwise
from zero8.spec.grid import BlockGrid


def resumed(path, source):
    """Load a plain file into an optimizer of one process; return `results` before and after."""
    content = torch.load(path, weights_only=True)
    model = Mixed()
    model.load_state_dict(content["model"])
    optimizer = Adam8bitBlockwise(named_groups(model, trained_names(source)))
    for group in optimizer.param_groups:
        group |= {"lr": 7.0, "weight_decay": 7.0, "betas": (0.1, 0.2)}
    optimizer.load_state_dict(content["optimizer"])
    saved = results(model, optimizer)
    run(model, optimizer, range(SAVED_AFTER, STEPS))
    return saved, results(model, optimizer)


# --- To a plain file ----------------------------------------------------------------------------


def slow(values, *quick):
    return [v if v in quick else pytest.param(v, marks=pytest.mark.slow) for v in values]


@pytest.mark.parametrize("source", slow(SOURCES, "plain"))
def test_convert_to_plain_goes_on_with_the_bits_of_the_source(source, made, source_at, unconverted):
    path, _ = made(source, "plain")
    saved, stepped = resumed(path, source)
    pieces = pieces_of(source_at(source))
    # A parameter without a gradient has no state in one process, and zeros under ZeRO.
    check(saved, unconverted()[0], pieces)
    check(stepped, unconverted()[1], pieces)
    assert ("exp_avg" in saved["unused"]) == ("zero" in source)


WITH_CUTS = [s for s in SOURCES if s[-1] in "23"]


def decoded_in(path):
    """Return by parameter both moments as each rank's codes and scales stand for them."""
    found = {}
    for fragment in fragments_in(path):
        numel = math.prod(SHAPES[fragment.name])
        moments = found.setdefault(fragment.name, [torch.zeros(numel) for _ in MOMENTS])
        there = slice(fragment.piece.first, fragment.piece.first + fragment.piece.numel)
        for values, store in zip(moments, fragment.stores, strict=True):
            values[there] = store.read(0, fragment.piece.numel)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("source", [name for name in WITH_CUTS if "dcp" not in name])
def test_convert_blocks_that_were_cut_are_within_half_a_code(source, made, source_at):
    """Those of FSDP2, of narrow rows, are put together as every load does: test_narrow.py."""
    path, _ = made(source, "plain")
    wholes = {f.name: f for f in fragments_in(path)}
    pieces, moved = pieces_of(source_at(source)), 0
    for name, exact in decoded_in(source_at(source)).items():
        cut = ~uncut(name, pieces).flatten()
        if not cut.any():
            continue
        block, _ = BlockGrid.of(SHAPES[name], 256).block_numbers(0, cut.numel())
        for store, values in zip(wholes[name].stores, exact, strict=True):
            scales = store.scales[block][cut]
            check_within_half_a_code(values[cut], store.codes[cut], scales, store.name)
            moved += int((store.read(0, cut.numel()) != values).sum())
    assert moved


# --- To the other forms -------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES)
def test_convert_to_fp32_loads_into_adamw_with_the_decoded_moments(source, made, source_at):
    path, _ = made(source, "fp32")
    content = torch.load(path, weights_only=True)
    expected = torch.load(made(source, "plain")[0], weights_only=True)
    decoded = decoded_in(source_at(source))
    model = Mixed()
    model.load_state_dict(content["model"])
    adamw = torch.optim.AdamW(named_groups(model, trained_names(source)))
    adamw.load_state_dict(content["optimizer"])
    assert adamw.param_groups[0]["lr"] == 2e-2 and adamw.param_groups[1]["weight_decay"] == 0.25
    for name, p in model.named_parameters():
        assert torch.equal(p, expected["model"][name])
        assert (name in decoded) == (p in adamw.state)
        if name in decoded:
            assert adamw.state[p]["step"].item() == SAVED_AFTER
            for which, values in zip(MOMENTS, decoded[name], strict=True):
                assert torch.equal(adamw.state[p][which].flatten(), values)
    run(model, adamw, range(1))
    # And back: quantize(dequantize(q)) is q.
    optimizer = Adam8bitBlockwise(named_groups(Mixed(), trained_names(source)))
    optimizer.load_state_dict(torch.load(path, weights_only=True)["optimizer"])
    for number, entries in optimizer.state_dict()["state"].items():
        theirs = expected["optimizer"]["state"][number]
        assert same(entries, theirs, theirs.keys() - {"history"})


def stage_of(source):
    number = SOURCES.index(source)
    return STAGES[(number + number // 3) % 3]


@pytest.fixture(scope="module")
def loaded(made, standing_ranks):
    """Return a function: of a kind of target and sources, what ranks hold; made at once."""
    found = {}

    def job_of(source):
        path = made(source, "zero")[0]
        job = {"source": path.parent, "tag": path.name, "steps": range(SAVED_AFTER, STEPS)}
        return job | {"ds_config": settings(stage_of(source), **ZERO)}

    def of(to, source):
        if (to, source) not in found:
            for world in WORLDS:
                mine = [s for n, s in enumerate(SOURCES) if 1 + n % 3 == world]
                if to == "dcp":
                    jobs = [{"source": made(source, to)[0]} for source in mine]
                    ranks = standing_ranks(world).run(load_dcp, jobs=jobs)
                else:
                    ranks = standing_ranks(world).run(visit, jobs=[job_of(s) for s in mine])
                for number, name in enumerate(mine):
                    found[to, name] = [rank[number] for rank in ranks]
        return found[to, source]

    return of


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES)
def test_convert_to_dcp_loads_and_goes_on_under_fsdp2(source, loaded, source_at, unconverted):
    world = 1 + SOURCES.index(source) % 3
    rows = [
        (name, start * width, min(chunk, SHAPES[name][0] - start) * width)
        for name in SHAPES
        for width in [math.prod(SHAPES[name][1:])]
        for chunk in [-(-SHAPES[name][0] // world)]
        for start in range(0, SHAPES[name][0], chunk)
    ]
    for rank in loaded("dcp", source):
        check(rank["loaded"], unconverted()[0], pieces_of(source_at(source)))
        check(rank["stepped"], unconverted()[1], pieces_of(source_at(source)), rows)
        assert [group["lr"] for group in rank["groups"]] == [2e-2, 1e-2]
        assert [group["weight_decay"] for group in rank["groups"]] == [0.0, 0.25]


def gathered(ranks):
    """Return values and moments of whole parameters that ranks of ZeRO hold parts of."""
    return {
        name: {"values": entry["weights"].float(), **{w: decoded(entry, w) for w in MOMENTS}}
        for name, entry in joined(ranks).items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES)
def test_convert_to_zero_loads_with_the_same_moments_and_goes_on(
    source, loaded, made, source_at, unconverted
):
    """The bound of m^2/v, which no universal checkpoint has, is forgotten by the other too."""
    before, after = (
        [rank[when] for rank in loaded("zero", source)] for when in ("loaded", "stepped")
    )
    states = [state for rank in before for state in rank["states"]]
    parts = [(one.name, one.first, one.numel) for state in states for one in state["pieces"]]
    pieces = pieces_of(source_at(source))
    trained = [name for name in SHAPES if name != "frozen"]
    check(gathered(before), unconverted()[0], pieces, parts, names=trained)
    check(gathered(after), unconverted(True)[1], pieces, parts, names=trained)
    for rank in after:
        assert [group["lr"] for group in rank["options"]] == [2e-2, 1e-2]
