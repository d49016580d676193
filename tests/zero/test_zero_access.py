# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's access to single moments, and states that arrive from elsewhere."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.utils import safe_get_full_optimizer_state, safe_set_full_optimizer_state
from log_lines import warned
from nests import difference
from zero_worker import (
    MOMENTS,
    Bag,
    base_optimizer,
    config,
    held,
    make_engine,
    pattern,
    plain,
    take_step,
)

from zero8.spec.adam import ADAM
from zero8.spec.codec import DEFAULT_CODEC, codec_named
from zero8.state.store import MomentStore
from zero8.state.table import PieceTable

STAGES = (2, 3)
SET = "conv"  # lies on both ranks
TRAINED = [name for name in Bag.SHAPES if name != "frozen"]


def read_all(engine):
    """Return every moment in full as safe_get gives it, and the parts that this rank holds."""
    full = {
        (name, which): safe_get_full_optimizer_state(getattr(engine.module, name), which)
        for name in TRAINED
        for which in MOMENTS
    }
    parts = []
    for state in base_optimizer(engine).state.values():
        for which in MOMENTS:
            dense = state[which].clone()
            for piece in state[which].store.table.pieces:
                values = dense[piece.start : piece.start + piece.numel].clone()
                parts.append(((piece.name, which), piece.first, values))
    return {"full": full, "parts": parts, **held(engine)}


def new_values(which):
    """Return what is set: values that no 8-bit code has."""
    values = pattern(f"set {which}", Bag.SHAPES[SET])
    return values.square() if which == "exp_avg_sq" else values


def access(stage):
    """Read, step, read again, set, read again, step."""
    engine = make_engine(config(stage=stage), Bag())
    take_step(engine, 0)
    take_step(engine, 1)
    result = {"first": read_all(engine)}
    take_step(engine, 2)
    result["stepped"] = read_all(engine)
    for which in MOMENTS:
        safe_set_full_optimizer_state(getattr(engine.module, SET), new_values(which), which)
    result["set"] = read_all(engine)
    take_step(engine, 3)
    result["stepped on"] = read_all(engine)
    return result


def absorb(stage):
    """Put dense float32 moments into the state of one engine, write the same into the other's."""
    engines = [make_engine(config(stage=stage), Bag()) for _ in range(2)]
    for engine in engines:
        take_step(engine, 0)
        take_step(engine, 1)
    given, written = (base_optimizer(engine).state.values() for engine in engines)
    for state in given:
        for which in MOMENTS:
            state[which] = state[which].clone() * 3.0
    for state in written:
        for which in MOMENTS:
            state[which].copy_(state[which].clone() * 3.0)
    dense = [type(state["exp_avg"]) is torch.Tensor for state in given]
    for engine in engines:
        take_step(engine, 2)
    return {"dense": all(dense), "given": held(engines[0]), "written": held(engines[1])}


def absorb_damaged():
    """Put dense moments into the state, one of another size; return what a step leaves of them."""
    engine = make_engine(config(), Bag())
    take_step(engine, 0)
    base = base_optimizer(engine)
    ((flat, state),) = base.state.items()
    dense = state["exp_avg"].clone()
    state |= {"exp_avg": dense, "exp_avg_sq": torch.ones(len(dense) - 1)}
    flat.grad = torch.zeros_like(flat)
    before = flat.detach().clone()
    try:
        base.step()
    except ValueError as error:
        message = str(error)
    same = state["exp_avg"] is dense and torch.equal(flat, before) and state["step"] == 1
    return {"message": message, "same": same}


def set_first_piece(store, **change):
    first, *others = store.table.pieces
    store.table = PieceTable((replace(first, **change), *others), store.table.numel)


def load_states():
    """Load a state dict: as it is, into another codec, and damaged ones."""
    engine = make_engine(config(), Bag())
    take_step(engine, 0)
    saved = copy.deepcopy(base_optimizer(engine).state_dict())
    result = {"saved": held(engine)}

    fresh = make_engine(config(), Bag())
    base_optimizer(fresh).load_state_dict(saved)
    without_decay = config(codec="dynamic")
    del without_decay["optimizer"]["params"]["weight_decay"]
    with warned() as lines:
        other = make_engine(without_decay, Bag())
        base_optimizer(other).load_state_dict(copy.deepcopy(saved))
    result |= {"verbatim": held(fresh), "other codec": held(other), "errors": {}, "lines": lines}
    take_step(fresh, 1)
    (state,) = saved["state"].values()
    result["source after a step"] = {which: plain(state[which]) for which in MOMENTS}
    take_step(engine, 1)
    base_optimizer(engine).load_state_dict(saved)
    result["back"] = held(engine)

    renamed = copy.deepcopy(saved)
    (state,) = renamed["state"].values()
    for which in MOMENTS:
        set_first_piece(state[which].store, identity=12345, name="before")
    fresh = make_engine(config(), Bag())
    base_optimizer(fresh).load_state_dict(renamed)
    result["renamed"] = held(fresh)
    take_step(fresh, 1)
    (state,) = base_optimizer(fresh).state.values()
    result["renamed, a step on"] = state["history"]

    for name in ("another range", "another parameter", "no moments", "a scale of NaN"):
        broken = copy.deepcopy(saved)
        (state,) = broken["state"].values()
        if name == "no moments":
            del state["exp_avg"]
        elif name == "a scale of NaN":
            state["exp_avg"].store.scales[0] = math.nan
        else:
            # Of as many blocks, so that only the places differ.
            store = state["exp_avg"].store
            first, (rows, *row) = store.table.pieces[0].first, store.table.pieces[0].shape
            changes = {
                "another range": {"first": first + math.prod(row), "shape": (rows + 1, *row)},
                "another parameter": {"shape": (rows, *row, 1)},
            }
            set_first_piece(store, **changes[name])
        try:
            base_optimizer(engine).load_state_dict(broken)
        except ValueError as error:
            result["errors"][name] = str(error)
    result["after errors"] = held(engine)
    return result


def load_older_states():
    """Load states in which a parameter of narrow rows has float32 moments, as all had once."""
    older = make_engine(config(fp32_params=["thin"]), Bag())
    for step in (0, 1):
        take_step(older, step)
    loaded = make_engine(config(), Bag())
    base_optimizer(loaded).load_state_dict(copy.deepcopy(base_optimizer(older).state_dict()))
    result = {"saved": held(older), "loaded": held(loaded)}
    take_step(loaded, 2)
    return result | {"stepped on": held(loaded)}


def move_away_and_back(**options):
    """Take a step, have DeepSpeed offload and reload its states, take another; and without that.

    Options are those of `offload_states`.
    """
    moved, stayed = (make_engine(config(offload=None), Bag()) for _ in range(2))
    for engine in (moved, stayed):
        take_step(engine, 0)
    moved.offload_states(**options)
    moved.reload_states()
    for engine in (moved, stayed):
        take_step(engine, 1)
    return {"moved": held(moved), "stayed": held(stayed)}


def load_while_moved(folder):
    """Save, step, and load while states are offloaded; return what was held, and then is, by what
    is offloaded, and rows of memory reports."""
    result = {}
    for number, include in enumerate(([], *([one] for one in OffloadStateTypeEnum))):
        engine = make_engine(config(offload=None), Bag())
        take_step(engine, 0)
        engine.save_checkpoint(folder, tag=f"{number}")
        rows = base_optimizer(engine).memory_report().to_dicts()
        before = held(engine)
        take_step(engine, 1)
        engine.offload_states(include=include or None)
        same_rows = base_optimizer(engine).memory_report().to_dicts() == rows
        engine.load_checkpoint(folder, tag=f"{number}")
        engine.reload_states()
        result[str(include)] = {"before": before, "loaded": held(engine), "same rows": same_rows}
    return result


def access_all(folder):
    """Run all of this file's scenarios in one process."""
    return {
        "access": {stage: access(stage) for stage in STAGES},
        "absorb": {stage: absorb(stage) for stage in STAGES},
        "load": load_states(),
        "older": load_older_states(),
        "offload": move_away_and_back(),
        "load while offloaded": load_while_moved(folder),
        "damaged": absorb_damaged(),
    }


@pytest.fixture(scope="module")
def ranks(standing_ranks, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("offloaded"))
    return standing_ranks(2).run(access_all, folder=folder)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("when", ["first", "stepped", "set", "stepped on"])
def test_safe_get_returns_what_the_ranks_hold_now(ranks, stage, when):
    """The views that DeepSpeed takes once after the first step must follow every later one."""
    reads = [rank["access"][stage][when] for rank in ranks]
    put_together = {
        (name, which): torch.full(Bag.SHAPES[name], torch.nan).flatten()
        for name in TRAINED
        for which in MOMENTS
    }
    for read in reads:
        for key, first, values in read["parts"]:
            put_together[key][first : first + len(values)] = values
    for key, expected in put_together.items():
        for read in reads:
            assert read["full"][key].dtype == torch.float32
            assert torch.equal(read["full"][key].flatten(), expected), key


@pytest.mark.parametrize("stage", STAGES)
def test_safe_get_changes_from_step_to_step(ranks, stage):
    first, stepped = (ranks[0]["access"][stage][when]["full"] for when in ("first", "stepped"))
    for name in TRAINED:
        if name != "unused":
            assert not torch.equal(first[name, "exp_avg"], stepped[name, "exp_avg"])


@pytest.mark.parametrize("stage", STAGES)
def test_safe_set_writes_the_nearest_codes_and_touches_no_other_parameter(ranks, stage):
    for rank in ranks:
        before, after = (rank["access"][stage][when] for when in ("stepped", "set"))
        assert difference(before["parameters"], after["parameters"]) == ""
        for old, new in zip(before["states"], after["states"], strict=True):
            for which in MOMENTS:
                table = PieceTable(new["pieces"], len(new["master"]))
                store = MomentStore(
                    codec_named(DEFAULT_CODEC), ADAM.moment(which), table, *old[which]
                )
                for piece in table.pieces:
                    if piece.name == SET:
                        values = new_values(which).flatten()
                        store.write(piece.start, values[piece.first : piece.first + piece.numel])
                got = dict(zip(("codes", "scales", "dense"), new[which], strict=True))
                for name, tensor in got.items():
                    assert torch.equal(tensor, getattr(store, name)), (which, name)
        assert not torch.equal(before["full"][SET, "exp_avg"], after["full"][SET, "exp_avg"])


@pytest.mark.parametrize("stage", STAGES)
def test_step_after_safe_set_uses_the_new_moments(ranks, stage):
    """m' = 0.9 m + 0.1 g; a gradient entry of zero leaves 0.9 of what was set, to one code."""
    gradient = pattern(f"{SET} 3", Bag.SHAPES[SET])
    full = {w: ranks[0]["access"][stage][w]["full"][SET, "exp_avg"] for w in ("set", "stepped on")}
    rest = gradient == 0
    row_extreme = full["stepped on"].abs().amax(dim=(2, 3), keepdim=True).expand_as(gradient)
    error = (full["stepped on"] - 0.9 * full["set"]).abs()
    assert (error[rest] <= (full["set"].abs() + row_extreme)[rest] / 16).all()
    assert full["stepped on"][rest].abs().max() > 0


@pytest.mark.parametrize("stage", STAGES)
def test_dense_moments_in_the_state_are_absorbed_by_the_next_step(ranks, stage):
    """The same as writing them, bit for bit; afterwards the state is 8-bit again."""
    for rank in ranks:
        result = rank["absorb"][stage]
        assert result["dense"]
        assert difference(result["given"], result["written"]) == ""
        for state in result["given"]["states"]:
            assert state["exp_avg"][0].dtype == torch.uint8


@pytest.mark.parametrize("stage", STAGES)
def test_moments_that_were_written_have_an_unknown_history(ranks, stage):
    """The clip of the update rests on moments that steps have made: others must not be clipped.

    For those the bound on m^2/v is below 10/(1 - 0.81/0.999) = 52.9 with the default betas."""
    for rank in ranks:
        stepped, on = (rank["access"][stage][w]["states"] for w in ("set", "stepped on"))
        assert all(state["history"] < 53 for state in stepped)
        touched = [any(p.name == SET for p in state["pieces"]) for state in on]
        assert any(touched)
        assert all(state["history"] > 1e38 for state, yes in zip(on, touched, strict=True) if yes)


def test_state_dict_loads_verbatim_into_a_fresh_and_a_stepped_optimizer(ranks):
    for rank in ranks:
        load = rank["load"]
        for name in ("verbatim", "back"):
            for got, saved in zip(load[name]["states"], load["saved"]["states"], strict=True):
                for key in (*MOMENTS, "step", "history", "pieces"):
                    assert difference(got[key], saved[key]) == "", (name, key)


def test_state_dict_that_was_loaded_does_not_follow_the_optimizer(ranks):
    for rank in ranks:
        (saved,) = rank["load"]["saved"]["states"]
        for which in MOMENTS:
            assert difference(rank["load"]["source after a step"][which], saved[which]) == ""


def test_state_dict_keeps_the_identity_that_the_dither_depends_on(ranks):
    """A parameter that was renamed goes on with the dither that it had, and with its history."""
    for rank in ranks:
        (got,), (saved,) = rank["load"]["renamed"]["states"], rank["load"]["saved"]["states"]
        assert got["pieces"][0] == replace(saved["pieces"][0], identity=12345)
        assert got["pieces"][1:] == saved["pieces"][1:]
        assert difference(got["exp_avg"], saved["exp_avg"]) == ""
        assert rank["load"]["renamed, a step on"] < 53


def test_state_dict_of_another_codec_is_encoded_again(ranks):
    for rank in ranks:
        (got,), (saved,) = rank["load"]["other codec"]["states"], rank["load"]["saved"]["states"]
        table = PieceTable(saved["pieces"], len(saved["master"]))
        for which in MOMENTS:
            source = MomentStore(
                codec_named(DEFAULT_CODEC), ADAM.moment(which), table, *saved[which]
            )
            expected = MomentStore.zeros(codec_named("dynamic"), ADAM.moment(which), table)
            expected.write(0, source.read(0, table.numel))
            buffers = (expected.codes, expected.scales, expected.dense)
            assert difference(got[which], buffers) == ""


def test_engine_whose_config_has_no_weight_decay_logs_nothing_of_it(ranks):
    """DeepSpeed's own Adams have 0, too."""
    for rank in ranks:
        assert [line for line in rank["load"]["lines"] if "weight_decay" in line] == []


def test_state_dict_of_another_codec_logs_one_line_on_rank_0(ranks):
    for number, rank in enumerate(ranks):
        lines = [line for line in rank["load"]["lines"] if "were saved with" in line]
        assert len(lines) == (number == 0)
        for line in lines:
            forms = [f"codec={name!r}, block_size=256" for name in (DEFAULT_CODEC, "dynamic")]
            expected = f"zero8: moments were saved with {forms[0]} and loaded with"
            assert line.startswith(f"{expected} {forms[1]},")


def test_state_dict_of_float32_moments_of_narrow_rows_is_quantized(ranks):
    """By writing them; the other parameters' codes and scales come over as they are."""
    thin = 0
    for rank in ranks:
        ((got,), (saved,)) = (rank["older"][name]["states"] for name in ("loaded", "saved"))
        tables = [PieceTable(state["pieces"], len(state["master"])) for state in (got, saved)]
        assert [piece.name for piece in tables[0].pieces if not piece.is_quantized] == [
            piece.name
            for piece in tables[1].pieces
            if not piece.is_quantized and piece.name != "thin"
        ]
        for which in MOMENTS:
            codec = codec_named(DEFAULT_CODEC)
            ours, theirs = (
                MomentStore(codec, ADAM.moment(which), table, *state[which])
                for table, state in zip(tables, (got, saved), strict=True)
            )
            expected = MomentStore.zeros(codec, ADAM.moment(which), tables[0])
            expected.write(0, theirs.read(0, tables[1].numel))
            assert difference(got[which], expected.buffers) == ""
            for number, piece in enumerate(tables[0].pieces):
                mine, before = ours.piece(number), theirs.piece(number)
                if piece.name == "thin":
                    assert before.scales is None and len(mine.scales) == 24
                    thin += 1
                else:
                    assert torch.equal(mine.values, before.values), piece.name
                    assert mine.scales is None or torch.equal(mine.scales, before.scales)
        assert (got["step"], got["history"]) == (saved["step"], saved["history"])
        (on,) = rank["older"]["stepped on"]["states"]
        assert on["step"] == 3 and on["master"].isfinite().all()
    assert thin == len(MOMENTS)


def test_state_dict_of_another_partition_is_refused_and_changes_nothing(ranks):
    for rank in ranks:
        errors = rank["load"]["errors"]
        for name in ("another range", "another parameter"):
            assert "holds other ranges of parameters" in errors[name]
            assert "--to zero" in errors[name]
        assert "without ['exp_avg']" in errors["no moments"]
        assert "got a scale that is not finite" in errors["a scale of NaN"]
        assert difference(rank["load"]["after errors"], rank["load"]["back"]) == ""


def test_offload_and_reload_of_states_changes_nothing(ranks):
    for rank in ranks:
        assert difference(rank["offload"]["moved"], rank["offload"]["stayed"]) == ""


def test_checkpoint_loads_and_reports_stay_while_states_are_offloaded(ranks):
    """As with torch's AdamW: DeepSpeed takes away then what says which parts a rank holds."""
    for rank in ranks:
        for include, result in rank["load while offloaded"].items():
            assert difference(result["before"], result["loaded"]) == "", include
            assert result["same rows"], include


def test_dense_moments_of_another_size_are_refused_and_kept_as_they_were(ranks):
    for rank in ranks:
        numel = len(rank["load"]["saved"]["states"][0]["master"])
        message = rank["damaged"]["message"]
        assert f"of {numel} elements: got exp_avg_sq of {numel - 1}" in message
        assert rank["damaged"]["same"]
