# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's access to single moments, and states that arrive from elsewhere."""

import copy
from dataclasses import replace

import pytest
import torch
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.utils import safe_set_full_optimizer_state
from nests import difference
from zero_worker import (
    MOMENTS,
    Bag,
    base_optimizer,
    config,
    held,
    make_engine,
    plain,
    take_step,
)

from zero8.spec.adam import ADAM
from zero8.spec.codec import DEFAULT_CODEC, codec_named
from zero8.state.store import MomentStore
from zero8.state.table import PieceTable

STAGES = (2, 3)
SET = "conv"  # lies on both ranks


def write(stage):
    """Return what is held after steps, after writes, and after a step more."""
    engine = make_engine(config(stage=stage), Bag())
    take_step(engine, 0)
    take_step(engine, 1)
    result = {"stepped": held(engine)}
    for which in MOMENTS:
        safe_set_full_optimizer_state(
            getattr(engine.module, SET), torch.ones(Bag.SHAPES[SET]), which
        )
    take_step(engine, 2)
    return result | {"stepped on": held(engine)}


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


def set_first_piece(store, **change):
    first, *others = store.table.pieces
    store.table = PieceTable((replace(first, **change), *others), store.table.numel)


def load_states():
    """Load a state dict into another codec, and of parameters that had other names."""
    engine = make_engine(config(), Bag())
    take_step(engine, 0)
    saved = copy.deepcopy(base_optimizer(engine).state_dict())
    result = {"saved": held(engine)}

    other = make_engine(config(codec="dynamic"), Bag())
    base_optimizer(other).load_state_dict(copy.deepcopy(saved))
    result["other codec"] = held(other)
    renamed = copy.deepcopy(saved)
    (state,) = renamed["state"].values()
    for which in MOMENTS:
        set_first_piece(state[which].store, identity=12345, name="before")
    fresh = make_engine(config(), Bag())
    base_optimizer(fresh).load_state_dict(renamed)
    result["renamed"] = held(fresh)
    take_step(fresh, 1)
    result["source after a step"] = {which: plain(state[which]) for which in MOMENTS}
    (state,) = base_optimizer(fresh).state.values()
    result["renamed, a step on"] = state["history"]
    return result


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
        "access": {stage: write(stage) for stage in STAGES},
        "absorb": {stage: absorb(stage) for stage in STAGES},
        "load": load_states(),
        "load while offloaded": load_while_moved(folder),
    }


@pytest.fixture(scope="module")
def ranks(standing_ranks, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("offloaded"))
    return standing_ranks(2).run(access_all, folder=folder)


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
    """The clip of the update rests on moments that steps have made: others must not be clipped."""
    for rank in ranks:
        stepped, on = (rank["access"][stage][w]["states"] for w in ("stepped", "stepped on"))
        assert all(state["history"] < 53 for state in stepped)
        touched = [any(p.name == SET for p in state["pieces"]) for state in on]
        assert any(touched)
        assert all(state["history"] > 1e38 for state, yes in zip(on, touched, strict=True) if yes)


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


def test_checkpoint_loads_and_reports_stay_while_states_are_offloaded(ranks):
    """As with torch's AdamW: DeepSpeed takes away then what says which parts a rank holds."""
    for rank in ranks:
        for include, result in rank["load while offloaded"].items():
            assert difference(result["before"], result["loaded"]) == "", include
            assert result["same rows"], include
