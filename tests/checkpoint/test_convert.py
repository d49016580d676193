# SPDX-License-Identifier: Apache-2.0
"""Conversions between frameworks: what is verbatim, what is within half a code, what goes on.

The gradients of `convert_model` are the same numbers in every framework, at 1, 2 and 3 ranks, so
that a training that was never converted is one of one process, except in blocks that a shard
boundary cut.
"""

import math
from functools import cache

import psutil
import pytest
import small_optimizers
import torch
from convert_cases import (
    MOMENTS,
    SOURCES,
    STAGES,
    ZERO,
    check,
    converted,
    pieces_of,
    rows_of,
    same,
    trained_names,
    uncut,
)
from convert_model import (
    SAVED_AFTER,
    SHAPES,
    STEPS,
    Mixed,
    named_groups,
    results,
    saved_plain,
    train,
)
from convert_worker import load_dcp, save_dcp, settings, visit
from fragments import fragments_in
from fsdp_worker import run
from params import each
from universal_cuts import check_within_half_a_code, decoded, joined

from zero8 import Adam8bitBlockwise
from zero8.files.inside import release
from zero8.spec.algorithm import UNKNOWN
from zero8.spec.grid import BlockGrid


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("convert")


@pytest.fixture(scope="module")
def source_at(folder, standing_ranks):
    """Return a function: of one of SOURCES, its path; all of a number of ranks are made at once."""

    @cache
    def make(world):
        if not world:
            return saved_plain(folder / "plain")
        # In stage 2 a bfloat16 model, with float32 master weights.
        configs = {s: settings(s, dtype={} if s == 2 else None, **ZERO) for s in STAGES}
        jobs = [
            {
                "ds_config": config,
                "steps": range(SAVED_AFTER),
                "target": folder / f"zero{s}x{world}",
            }
            for s, config in configs.items()
        ]
        standing_ranks(world).run(visit, jobs=jobs)
        standing_ranks(world).run(save_dcp, jobs=[{"name": f"dcpx{world}"}], folder=folder)

    def of(name):
        make(0 if name == "plain" else int(name[-1]))
        return folder / name

    return of


@pytest.fixture(scope="module")
def made(folder, source_at):
    """Return a function: of a source and a target, the path of the conversion."""

    @cache
    def of(source, to):
        path = folder / f"{source}-{to}"
        converted(source_at(source), path, to)
        return path

    return of


@cache
def unconverted(forgets_history=False):
    """Return what one process holds when it would save, and after more steps."""
    model, optimizer = train()
    saved = results(model, optimizer)
    for state in optimizer.state.values():
        if forgets_history:
            state["history"] = UNKNOWN
    run(model, optimizer, SAVED_AFTER, STEPS)
    return saved, results(model, optimizer)


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
    run(model, optimizer, SAVED_AFTER, STEPS)
    return saved, results(model, optimizer)


# --- To a plain file ----------------------------------------------------------------------------


@each(SOURCES, [source for source in SOURCES if source != "plain"])
def test_convert_to_plain_goes_on_with_the_bits_of_the_source(name, made, source_at):
    saved, stepped = resumed(made(name, "plain"), name)
    pieces = pieces_of(source_at(name))
    # A parameter without a gradient has no state in one process, and zeros under ZeRO.
    check(saved, unconverted()[0], pieces)
    check(stepped, unconverted()[1], pieces)
    assert ("exp_avg" in saved["unused"]) == ("zero" in name)


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
@pytest.mark.parametrize("source", [s for s in SOURCES if "zero" in s and s[-1] in "23"])
def test_convert_blocks_that_were_cut_are_within_half_a_code(source, made, source_at):
    """Those of FSDP2, of narrow rows, are put together as every load does: test_narrow.py."""
    wholes = {f.name: f for f in fragments_in(made(source, "plain"))}
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
    content = torch.load(made(source, "fp32"), weights_only=True)
    expected = torch.load(made(source, "plain"), weights_only=True)
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
    run(model, adamw, 0, 1)
    # And back: quantize(dequantize(q)) is q.
    optimizer = Adam8bitBlockwise(named_groups(Mixed(), trained_names(source)))
    optimizer.load_state_dict(torch.load(made(source, "fp32"), weights_only=True)["optimizer"])
    for number, entries in optimizer.state_dict()["state"].items():
        theirs = expected["optimizer"]["state"][number]
        assert same(entries, theirs, theirs.keys() - {"history"})


def world_of(source):
    """Return on how many ranks a conversion is loaded."""
    return 1 + SOURCES.index(source) % 3


@pytest.fixture(scope="module")
def loaded(made, standing_ranks):
    """Return a function: of a target and a source, what ranks hold; of a world made at once."""

    @cache
    def all_of(to, world):
        mine = [source for source in SOURCES if world_of(source) == world]
        jobs = []
        for source in mine:
            path, number = made(source, to), SOURCES.index(source)
            if to == "dcp":
                jobs.append({"source": path})
                continue
            ds_config = settings(STAGES[(number + number // 3) % 3], **ZERO)
            place = {"source": path.parent, "tag": path.name}
            jobs.append({"ds_config": ds_config, **place, "steps": range(SAVED_AFTER, STEPS)})
        ranks = standing_ranks(world).run(load_dcp if to == "dcp" else visit, jobs=jobs)
        return dict(zip(mine, zip(*ranks, strict=True), strict=True))

    return lambda to, source: all_of(to, world_of(source))[source]


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES)
def test_convert_to_dcp_loads_and_goes_on_under_fsdp2(source, loaded, source_at):
    rows = rows_of(world_of(source))
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
def test_convert_to_zero_loads_with_the_same_moments_and_goes_on(source, loaded, source_at):
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


# --- bfloat16 weights whose optimizer keeps 8 more bits of them -----------------------------------


CORRECTED = {"weight_correction_bits": 8}


@pytest.fixture(scope="module")
def corrected_sources(folder, standing_ranks):
    """bfloat16 weights with corrections: of one process, under FSDP2, as masters of ZeRO-2."""
    trained = saved_plain(folder / "bf16_plain", dtype=torch.bfloat16, **CORRECTED)
    jobs = [{"name": "bf16_dcp", "dtype": torch.bfloat16, **CORRECTED}]
    standing_ranks(2).run(save_dcp, jobs=jobs, folder=folder)
    masters = {"dtype": {"bf16_master_weights_and_grads": True}, **ZERO, **CORRECTED}
    job = {"ds_config": settings(2, "cpu", **masters), "target": folder / "bf16_zero"}
    standing_ranks(2).run(visit, jobs=[{**job, "steps": range(SAVED_AFTER)}])
    return trained


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
            expected_fp32 = small_optimizers.joined(p.detach(), ours)
            assert torch.equal(in_fp32[name], expected_fp32)
            if name == "embed":
                assert torch.equal(in_fp32["head.weight"], expected_fp32)


@pytest.mark.slow
def test_convert_to_zero_has_corrections_in_float32_master_weights(corrected_sources, folder):
    converted(folder / "bf16_dcp", folder / "bf16_dcp-zero", "zero")
    expected = torch.load(folder / "bf16_dcp-fp32", weights_only=True)["model"]
    assert (folder / "latest_universal").read_text() == "bf16_dcp-zero"
    for name in ("wide", "bias"):
        path = folder / "bf16_dcp-zero" / "zero" / name / "fp32.pt"
        assert torch.equal(torch.load(path)["param"], expected[name])


# --- Memory -------------------------------------------------------------------------------------


def test_release_of_mapped_files_takes_them_out_of_memory_until_they_are_read(tmp_path):
    path, bytes_per_mib = tmp_path / "file", 2**20
    path.write_bytes(bytes(range(256)) * 4096 * 64)
    held = torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)
    total, before = held.sum(), psutil.Process().memory_info().rss
    release(tmp_path / "fil")  # another
    release(path)
    assert before - psutil.Process().memory_info().rss > 60 * bytes_per_mib
    assert held.sum() == total
    release(tmp_path)
    assert before - psutil.Process().memory_info().rss > 60 * bytes_per_mib
