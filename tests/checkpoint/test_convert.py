# SPDX-License-Identifier: Apache-2.0
"""Conversions between frameworks: what is verbatim, what is within half a code, what goes on.

The gradients of `convert_model` are the same numbers in every framework, at 1, 2 and 3 ranks, so
that a training that was never converted is one of one process, except in blocks that a shard
boundary cut.
"""

import argparse
import itertools
import math
import shutil
from functools import cache

import pytest
import torch
from convert_model import (
    SAVED_AFTER,
    SHAPES,
    STEPS,
    Mixed,
    named_groups,
    results,
    run,
    train,
)
from convert_worker import load_dcp, load_zero, save_dcp, save_zero

from zero8 import Adam8bitBlockwise
from zero8.checkpoint import convert
from zero8.checkpoint.open import open_checkpoint
from zero8.spec.grid import BlockGrid
from zero8.spec.scalars import UNKNOWN_HISTORY

MOMENTS = ("exp_avg", "exp_avg_sq")
STAGES, WORLDS = (1, 2, 3), (1, 2, 3)
SOURCES = [
    *(f"zero{stage}x{world}" for stage in STAGES for world in WORLDS),
    *(f"dcpx{world}" for world in WORLDS),
    "plain",
]
QUANTIZED = ("embed", "wide", "conv", "lora_b", "unused")


def converted(source, target, to):
    """Convert by the command; return its JSON object."""
    parser = argparse.ArgumentParser()
    convert.add_arguments(parser)
    status, found, text = convert.run(parser.parse_args([str(source), str(target), "--to", to]))
    assert status == 0, text
    return found


def refusal(source, target, to="plain"):
    """Return what the command says when it refuses, and check that it has left nothing."""
    parser = argparse.ArgumentParser()
    convert.add_arguments(parser)
    before = sorted(target.parent.iterdir())
    status, found, text = convert.run(parser.parse_args([str(source), str(target), "--to", to]))
    assert status == 1 and found["error"] in text
    assert sorted(target.parent.iterdir()) == before
    return found["error"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("convert")


@pytest.fixture(scope="module")
def source_at(folder, standing_ranks):
    """Return a function: of one of SOURCES, its path; all of a number of ranks are made at once."""

    @cache
    def make(world):
        jobs = [{"name": f"zero{stage}x{world}", "stage": stage} for stage in STAGES]
        jobs[1]["dtype"] = {}  # a bfloat16 model, with float32 master weights
        standing_ranks(world).run(save_zero, jobs=jobs, folder=folder)
        standing_ranks(world).run(save_dcp, jobs=[{"name": f"dcpx{world}"}], folder=folder)

    @cache
    def plain():
        model, optimizer = train()
        content = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(content, folder / "plain")

    def of(name):
        plain() if name == "plain" else make(int(name[-1]))
        return folder / name

    return of


@pytest.fixture(scope="module")
def made(folder, source_at):
    """Return a function: of a source and a target, the path of the conversion and its result."""

    @cache
    def of(source, to):
        path = folder / f"{source}-{to}"
        return path, converted(source_at(source), path, to)

    return of


@pytest.fixture(scope="module")
def unconverted():
    """What one process holds when it would save, and after more steps; by whether history goes."""

    @cache
    def of(forgets_history=False):
        model, optimizer = train()
        saved = results(model, optimizer)
        for state in optimizer.state.values():
            if forgets_history:
                state["history"] = UNKNOWN_HISTORY
        run(model, optimizer, range(SAVED_AFTER, STEPS))
        return saved, results(model, optimizer)

    return of


# --- Which elements are in blocks that somebody has cut -----------------------------------------


def pieces_of(source):
    return [
        (fragment.name, piece.first, piece.numel)
        for fragment in open_checkpoint(source).all_fragments()
        for piece in fragment.pieces
    ]


def uncut(name, *all_pieces):
    """Return which elements of a parameter are in blocks that lie in one piece, everywhere."""
    shape, kept = SHAPES[name], torch.ones(math.prod(SHAPES[name]), dtype=torch.bool)
    if name not in QUANTIZED:
        return kept.view(shape)
    block, count = BlockGrid.of(shape, 256).block_numbers(0, kept.numel())
    whole = torch.zeros(count, dtype=torch.bool)
    for pieces in all_pieces:
        whole[:] = False
        runs = [(first, numel) for owner, first, numel in pieces if owner == name and numel]
        for first, numel in runs or [(0, kept.numel())]:
            inside = torch.bincount(block[first : first + numel], minlength=count)
            whole |= inside == torch.bincount(block, minlength=count)
        kept &= whole[block]
    return kept.view(shape)


def check(got, expected, *all_pieces, names=SHAPES):
    """Check that values and moments are equal bit by bit, except in blocks that are cut."""
    for name in names:
        kept = uncut(name, *all_pieces)
        assert kept.float().mean() > 0.85
        for key, values in expected[name].items():
            if key in got[name]:
                ours = got[name][key].view(SHAPES[name])
                assert torch.equal(ours[kept], values.view(SHAPES[name])[kept]), f"{name}.{key}"


def trained_names(source):
    """ZeRO knows nothing of the optimizer's frozen parameters."""
    return {name for name in SHAPES if name != "frozen"} if "zero" in source else set(SHAPES)


def resumed(path, source, steps=True):
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


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES)
def test_convert_to_plain_keeps_codes_and_scales_of_all_blocks_that_are_whole(
    source, made, source_at
):
    path, result = made(source, "plain")
    fragments = list(open_checkpoint(source_at(source)).all_fragments())
    pieces, blocks_cut = pieces_of(source_at(source)), set()
    wholes = {f.name: f for f in open_checkpoint(path).all_fragments()}
    for fragment in fragments:
        whole = wholes[fragment.name]
        assert (fragment.step, whole.step) == (SAVED_AFTER, SAVED_AFTER)
        assert whole.history == max(f.history for f in fragments if f.name == fragment.name)
        kept = uncut(fragment.name, pieces).flatten()
        for mine, theirs in zip(whole.stores, fragment.stores, strict=True):
            assert mine.codec == theirs.codec or not whole.is_quantized
            for number, piece in enumerate(fragment.pieces):
                if not piece.is_quantized or not piece.numel:
                    continue
                assert piece.identity == whole.pieces[0].identity
                here = slice(piece.first, piece.first + piece.numel)
                codes, got = theirs.moment(number).values, mine.codes[here]
                assert torch.equal(got[kept[here]], codes[kept[here]])
                block, _ = piece.grid.block_numbers(0, piece.grid.num_rows * piece.grid.row_length)
                for element, scale in _first_of_blocks(piece, theirs.moment(number).scales):
                    number_of_block = int(block[element])
                    if kept[element]:
                        assert torch.equal(mine.scales[number_of_block], scale)
                    else:
                        blocks_cut.add((fragment.name, number_of_block))
    assert result["blocks_joined"] <= len(blocks_cut)
    assert (result["blocks_joined"] > 0) == (source in WITH_CUTS), blocks_cut


WITH_CUTS = [s for s in SOURCES if s[-1] in "23"]


def _first_of_blocks(piece, scales):
    """Yield an element of each block that a piece touches, and the block's scale there."""
    block, _ = piece.grid.block_numbers(piece.first, piece.numel)
    for number, scale in enumerate(scales):
        yield piece.first + int(torch.nonzero(block == number)[0]), scale


@pytest.mark.slow
@pytest.mark.parametrize("source", WITH_CUTS)
def test_convert_blocks_that_were_cut_are_within_half_a_code(source, made, source_at):
    """Of both moments' codes over the whole block (`zero8.spec.log`).

    m has levels at 1/16 of an octave or less, in y = |m|/scale + 1: half a code is
    (|m| + scale)/32.  v has 254 steps between the bit patterns of the block's smallest and largest,
    so half a code is octaves/508 of v, as the patterns are linear within an octave.
    """
    path, _ = made(source, "plain")
    wholes = {f.name: f for f in open_checkpoint(path).all_fragments()}
    pieces, moved = pieces_of(source_at(source)), 0
    sides = {name: [torch.zeros(math.prod(SHAPES[name])) for _ in MOMENTS] for name in QUANTIZED}
    for fragment in open_checkpoint(source_at(source)).all_fragments():
        for piece in fragment.pieces:
            for which, store in enumerate(fragment.stores):
                if piece.is_quantized:
                    values = store.read(piece.start, piece.numel)
                    sides[fragment.name][which][piece.first : piece.first + piece.numel] = values
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
def test_convert_to_fp32_loads_into_adamw_with_the_decoded_moments(source, made):
    path, _ = made(source, "fp32")
    content = torch.load(path, weights_only=True)
    expected = torch.load(made(source, "plain")[0], weights_only=True)
    wholes = {f.name: f for f in open_checkpoint(made(source, "plain")[0]).all_fragments()}
    model = Mixed()
    model.load_state_dict(content["model"])
    adamw = torch.optim.AdamW(named_groups(model, trained_names(source)))
    adamw.load_state_dict(content["optimizer"])
    assert adamw.param_groups[0]["lr"] == 2e-2 and adamw.param_groups[1]["weight_decay"] == 0.25
    for name, p in model.named_parameters():
        assert torch.equal(p, expected["model"][name])
        assert (name in wholes) == (p in adamw.state)
        if name in wholes:
            assert adamw.state[p]["step"].item() == SAVED_AFTER
            for which, store in zip(MOMENTS, wholes[name].stores, strict=True):
                assert torch.equal(adamw.state[p][which].flatten(), store.read(0, p.numel()))
    run(model, adamw, range(1))
    # And back: quantize(dequantize(q)) is q.
    optimizer = Adam8bitBlockwise(named_groups(Mixed(), trained_names(source)))
    optimizer.load_state_dict(torch.load(path, weights_only=True)["optimizer"])
    for number, entries in optimizer.state_dict()["state"].items():
        theirs = expected["optimizer"]["state"][number]
        assert same(entries, theirs, theirs.keys() - {"history"})


def same(a, b, keys):
    return all(torch.equal(torch.as_tensor(a[key]), torch.as_tensor(b[key])) for key in keys)


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


# --- bfloat16 weights with corrections ----------------------------------------------------------


def corrected_weights(values, correction):
    """Return the 24-bit weights of `weight_correction_bits=8`."""
    bits = values.bfloat16().view(torch.int16).to(torch.int32) << 16
    return (bits + (correction.to(torch.int32) << 8)).view(torch.float32)


CORRECTED = {"weight_correction_bits": 8}


@pytest.fixture(scope="module")
def corrected_sources(folder, standing_ranks):
    """bfloat16 weights with corrections: of one process, under FSDP2, as masters of ZeRO-2."""
    model, optimizer = train(dtype=torch.bfloat16, **CORRECTED)
    content = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(content, folder / "bf16_plain")
    jobs = [{"name": "bf16_dcp", "dtype": torch.bfloat16, **CORRECTED}]
    standing_ranks(2).run(save_dcp, jobs=jobs, folder=folder)
    masters = {"dtype": {"bf16_master_weights_and_grads": True}, "offload": "cpu", **CORRECTED}
    jobs = [{"name": "bf16_zero", "stage": 2, **masters}]
    standing_ranks(2).run(save_zero, jobs=jobs, folder=folder)
    return model, optimizer


@pytest.mark.slow
@pytest.mark.parametrize("source", ["bf16_plain", "bf16_dcp", "bf16_zero"])
def test_convert_keeps_corrections_of_bfloat16_weights(source, corrected_sources, folder):
    """In 8-bit targets verbatim, in float32 ones as the last 8 bits of the weights."""
    expected, trained = corrected_sources
    result = converted(folder / source, folder / f"{source}-plain", "plain")
    assert result["notes"] == []
    content = torch.load(folder / f"{source}-plain", weights_only=True)
    model = Mixed(torch.bfloat16)
    model.load_state_dict(content["model"])
    optimizer = Adam8bitBlockwise(named_groups(model, trained_names(source)), **CORRECTED)
    optimizer.load_state_dict(content["optimizer"])
    result = converted(folder / source, folder / f"{source}-fp32", "fp32")
    assert ["corrections" in note for note in result["notes"]] == [True]
    in_fp32 = torch.load(folder / f"{source}-fp32", weights_only=True)["model"]
    pieces = pieces_of(folder / source)
    for name, p in model.named_parameters():
        q = getattr(expected, name)
        kept = uncut(name, pieces)
        assert torch.equal(p[kept], q[kept])
        if q in trained.state:
            ours, theirs = (
                o.state[p]["param_correction"] for o, p in ((optimizer, p), (trained, q))
            )
            assert theirs.any() and torch.equal(ours[kept], theirs[kept])
            expected_fp32 = corrected_weights(p.detach(), ours)
            assert torch.equal(in_fp32[name], expected_fp32)
            if name == "embed":
                assert torch.equal(in_fp32["head.weight"], expected_fp32)


@pytest.mark.slow
def test_convert_to_zero_has_corrections_in_float32_master_weights(corrected_sources, folder):
    converted(folder / "bf16_dcp", folder / "bf16_dcp-zero", "zero")
    expected = torch.load(folder / "bf16_dcp-fp32", weights_only=True)["model"]
    tag = (folder / "bf16_dcp-zero" / "latest_universal").read_text()
    for name in ("wide", "bias"):
        path = folder / "bf16_dcp-zero" / tag / "zero" / name / "fp32.pt"
        assert torch.equal(torch.load(path)["param"], expected[name])


# --- Other sources ------------------------------------------------------------------------------


def saved_plain(path, optimizer_class=Adam8bitBlockwise, named=True, **keywords):
    """Save a file of one process after a few steps; return model and optimizer."""
    model = Mixed()
    groups = named_groups(model)
    if not named:
        groups = [{**g, "params": [p for _, p in g["params"]]} for g in groups]
    optimizer = optimizer_class(groups, **keywords)
    run(model, optimizer, range(SAVED_AFTER))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    return model, optimizer


def test_convert_of_adamw_keeps_its_float32_moments(tmp_path):
    _, adamw = saved_plain(tmp_path / "in", torch.optim.AdamW)
    for to in ("plain", "fp32"):
        converted(tmp_path / "in", tmp_path / to, to)
        state = torch.load(tmp_path / to, weights_only=True)["optimizer"]["state"]
        for number, entries in adamw.state_dict()["state"].items():
            assert entries.keys() == state[number].keys()
            assert all(torch.equal(state[number][key], entries[key]) for key in entries)
    result = converted(tmp_path / "in", tmp_path / "dcp", "dcp")
    assert any("state_dict_format" in note for note in result["notes"])


def test_convert_of_parameters_without_names_is_for_plain_files(tmp_path):
    model, optimizer = saved_plain(tmp_path / "in", named=False)
    converted(tmp_path / "in", tmp_path / "plain", "plain")
    content = torch.load(tmp_path / "plain", weights_only=True)
    assert "param_names" not in content["optimizer"]["param_groups"][0]
    groups = [{**g, "params": [p for _, p in g["params"]]} for g in named_groups(model)]
    other = Adam8bitBlockwise(groups)
    other.load_state_dict(content["optimizer"])
    for key, entries in optimizer.state_dict()["state"].items():
        theirs = other.state_dict()["state"][key]
        assert all(
            torch.equal(torch.as_tensor(theirs[k]), torch.as_tensor(entries[k])) for k in entries
        )
    for to in ("dcp", "zero"):
        assert "named_parameters" in refusal(tmp_path / "in", tmp_path / to, to)


def test_convert_carries_states_to_bitsandbytes_and_back(tmp_path):
    """Blocks coincide in a parameter of rows of 512: its codes and scales are verbatim."""
    p = torch.nn.Parameter(torch.randn(24, 512, generator=torch.Generator().manual_seed(0)))
    optimizer = Adam8bitBlockwise([("p", p)], codec="dynamic")
    p.grad = p.detach().abs()  # of one sign: no block of m has a negative scale
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "in")
    converted(tmp_path / "in", tmp_path / "theirs", "bitsandbytes")
    state = torch.load(tmp_path / "theirs", weights_only=True)["optimizer"]["state"][0]
    assert torch.equal(state["state1"], optimizer.state[p]["exp_avg_q8"])
    converted(tmp_path / "theirs", tmp_path / "back", "plain")
    content = torch.load(tmp_path / "back", weights_only=True)["optimizer"]
    assert content["param_groups"][0]["param_names"] == ["p"]
    for key in ("exp_avg_q8", "exp_avg_scale", "exp_avg_sq_q8", "exp_avg_sq_scale"):
        assert torch.equal(content["state"][0][key], optimizer.state[p][key])


# --- What is refused ----------------------------------------------------------------------------


@pytest.fixture
def zero_copy(source_at, tmp_path):
    """Return a copy of a checkpoint of two ranks that a test may damage: the folder of its tag."""

    def of(stage):
        shutil.copytree(source_at(f"zero{stage}x2"), tmp_path / "in" / "checkpoint")
        (tag,) = (tmp_path / "in" / "checkpoint").glob("global_step*")
        return tag

    return of


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("rank", [0, 1])
def test_convert_without_a_ranks_file_is_refused(stage, rank, zero_copy, tmp_path):
    tag = zero_copy(stage)
    (path,) = tag.glob(f"*zero_pp_rank_{rank}_*optim_states.pt")
    path.unlink()
    error = refusal(tag, tmp_path / "in" / "out")
    assert str(tag) in error and ("in no file" in error or "no state of" in error)


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_convert_with_a_ranks_file_twice_is_refused(stage, zero_copy, tmp_path):
    tag = zero_copy(stage)
    (path,) = tag.glob("*zero_pp_rank_1_*optim_states.pt")
    shutil.copy(path, path.with_name(path.name.replace("rank_1_", "rank_2_")))
    error = refusal(tag, tmp_path / "in" / "out")
    assert "elements" in error and "again" in error and "_rank_" in error


@pytest.mark.slow
def test_convert_of_another_steps_file_is_refused(zero_copy, tmp_path):
    tag = zero_copy(2)
    (path,) = tag.glob("*zero_pp_rank_1_*optim_states.pt")
    content = torch.load(path, weights_only=False)
    for state in content["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
        state["step"] += 1
    torch.save(content, path)
    error = refusal(tag, tmp_path / "in" / "out")
    assert "4 in bf16_zero_pp_rank_0" in error and "5 in bf16_zero_pp_rank_1" in error


@pytest.mark.slow
def test_convert_of_dcp_without_a_file_is_refused(source_at, tmp_path):
    (tmp_path / "in").mkdir()
    shutil.copytree(source_at("dcpx2"), tmp_path / "in" / "checkpoint")
    (tmp_path / "in" / "checkpoint" / "__1_0.distcp").unlink()
    assert "__1_0.distcp" in refusal(tmp_path / "in" / "checkpoint", tmp_path / "in" / "out")


@pytest.mark.parametrize("to", convert.TARGETS)
def test_convert_of_damaged_values_is_refused_and_leaves_nothing(to, tmp_path):
    _, optimizer = saved_plain(tmp_path / "in", codec="dynamic")
    content = torch.load(tmp_path / "in", weights_only=True)
    content["optimizer"]["state"][1]["exp_avg_scale"][3] = torch.nan
    torch.save(content, tmp_path / "in")
    assert "lora_b" in refusal(tmp_path / "in", tmp_path / "out", to)


def test_convert_does_not_touch_an_output_that_is_there(tmp_path):
    saved_plain(tmp_path / "in")
    (tmp_path / "out").write_text("mine")
    assert "exists" in refusal(tmp_path / "in", tmp_path / "out")
    assert (tmp_path / "out").read_text() == "mine"


def test_convert_that_fails_while_writing_leaves_nothing(tmp_path, monkeypatch):
    saved_plain(tmp_path / "in")

    def fail(contents, path, staging):
        path.write_text("half")
        raise OSError("no space left")

    monkeypatch.setitem(convert.TARGETS, "plain", (fail, ""))
    assert "no space" in refusal(tmp_path / "in", tmp_path / "out")


def test_convert_to_zero_without_weights_is_refused(tmp_path):
    saved_plain(tmp_path / "in")
    content = torch.load(tmp_path / "in", weights_only=True)
    torch.save(content["optimizer"], tmp_path / "states")
    assert "embed: got no weights" in refusal(tmp_path / "states", tmp_path / "out", "zero")
    result = converted(tmp_path / "states", tmp_path / "out", "plain")
    assert "no weights" in result["notes"][0]
    assert "model" not in torch.load(tmp_path / "out", weights_only=True)


def test_convert_to_zero_of_different_steps_is_refused(tmp_path):
    saved_plain(tmp_path / "in")
    content = torch.load(tmp_path / "in", weights_only=True)
    content["optimizer"]["state"][0]["step"] += 1
    torch.save(content, tmp_path / "in")
    error = refusal(tmp_path / "in", tmp_path / "out", "zero")
    assert "embed 5" in error and "4 steps" in error
    converted(tmp_path / "in", tmp_path / "out", "plain")
