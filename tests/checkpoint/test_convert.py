# SPDX-License-Identifier: Apache-2.0
"""Conversions between frameworks: what is verbatim, what is within half a code, what goes on.

The gradients of `convert_model` are the same numbers in every framework, at 1, 2 and 3 ranks, so
that a training that was never converted is one of one process, except in blocks that a shard
boundary cut.
"""

import itertools
import math

import pytest
import torch
from convert_cases import (
    MOMENTS,
    QUANTIZED,
    SOURCES,
    STAGES,
    WORLDS,
    check,
    pieces_of,
    same,
    trained_names,
    uncut,
)
from convert_model import SAVED_AFTER, SHAPES, STEPS, Mixed, named_groups, results, run
from fragments import fragments_in

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
    """Of both moments' codes over the whole block (`zero8.spec.log`).

    Those of FSDP2, of narrow rows, are put together as every load does: tests/state/test_narrow.py.

    m has levels at 1/16 of an octave or less, in y = |m|/scale + 1: half a code is
    (|m| + scale)/32.  v has 254 steps between the bit patterns of the block's smallest and largest,
    so half a code is octaves/508 of v, as the patterns are linear within an octave.
    """
    path, _ = made(source, "plain")
    wholes = {f.name: f for f in fragments_in(path)}
    pieces, moved = pieces_of(source_at(source)), 0
    sides = decoded_in(source_at(source))
    for name in QUANTIZED:
        cut = ~uncut(name, pieces).flatten()
        if not cut.any() or name not in wholes:
            continue
        store_m, store_v = wholes[name].stores
        block, _ = BlockGrid.of(SHAPES[name], 256).block_numbers(0, cut.numel())
        for number in block[cut].unique():
            here = block == number
            m, v = (values[here] for values in sides[name])
            got_m, got_v = (s.read(0, cut.numel())[here] for s in (store_m, store_v))
            scale = m.abs().max() / 15  # of 4 octaves; that of 8 is smaller
            assert ((got_m - m).abs() <= (m.abs() + scale) / 32 * 1.001).all()
            octaves = 0.0
            if (v > 0).any():
                low, high = v[v > 0].view(torch.int32).aminmax()
                octaves = (high - low) / 2**23
            assert ((got_v - v).abs() <= v * octaves / 508 * 1.001 + 1e-45).all()
            assert torch.equal(got_v == 0, v == 0)
            moved += int((got_m != m).sum())
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


@pytest.fixture(scope="module")
def loaded(made, standing_ranks):
    """Return a function: of a kind of target and sources, what ranks hold; made at once."""
    found = {}

    def of(to, source):
        if (to, source) not in found:
            for world in WORLDS:
                mine = [s for n, s in enumerate(SOURCES) if 1 + n % 3 == world]
                jobs = [{"source": made(s, to)[0]} for s in mine]
                if to == "zero":
                    places = [SOURCES.index(s) for s in mine]
                    stages = [STAGES[(n + n // 3) % 3] for n in places]
                    jobs = [j | {"stage": s} for j, s in zip(jobs, stages, strict=True)]
                # Imported here, as it takes DeepSpeed along, which the quick test does not need.
                from convert_worker import load_dcp, load_zero

                work = load_zero if to == "zero" else load_dcp
                ranks = standing_ranks(world).run(work, jobs=jobs)
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


def gathered(ranks, key):
    """Return values and moments of whole parameters that ranks of ZeRO hold parts of."""
    found = {}
    for name, first, tensors in itertools.chain.from_iterable(rank[key] for rank in ranks):
        for which, values in zip(("values", *MOMENTS), tensors, strict=True):
            whole = found.setdefault(name, {}).setdefault(
                which, torch.full(SHAPES[name], torch.nan)
            )
            whole.view(-1)[first : first + len(values)] = values
    return found


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES)
def test_convert_to_zero_loads_with_the_same_moments_and_goes_on(
    source, loaded, made, source_at, unconverted
):
    """The bound of m^2/v, which no universal checkpoint has, is forgotten by the other too."""
    ranks = loaded("zero", source)
    parts = [(name, first, len(t[0])) for rank in ranks for name, first, t in rank["loaded"]]
    pieces = pieces_of(source_at(source))
    trained = [name for name in SHAPES if name != "frozen"]
    check(gathered(ranks, "loaded"), unconverted()[0], pieces, parts, names=trained)
    check(gathered(ranks, "stepped"), unconverted(True)[1], pieces, parts, names=trained)
    for rank in ranks:
        assert [group["lr"] for group in rank["groups"]] == [2e-2, 1e-2]
