# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's access to moments, states that arrive from elsewhere, and interrupted steps."""

import copy
import signal
from dataclasses import replace

import pytest
import torch
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from nests import assert_same
from page_locked import page_locked
from ranks import on_ranks
from zero_worker import MOMENTS, Bag, base_optimizer, config, held, make_engine, plain, take_step

from zero8.state.table import PieceTable

STAGES = (2, 3)


def stepped(steps=1, groups=None, **options):
    """Return an engine over a new `Bag` that has taken steps."""
    bag = Bag()
    engine = make_engine(config(**options), bag, groups and groups(list(bag.parameters())))
    for step in range(steps):
        take_step(engine, step)
    return engine


def states_of(engine):
    return list(base_optimizer(engine).state.values())


def assert_steps_are_the_same(ours, theirs, step):
    for engine in (ours, theirs):
        take_step(engine, step)
    assert_same(held(ours), held(theirs))


@on_ranks(2)
def test_state_dict_keeps_the_identity_that_the_dither_depends_on():
    """A parameter that was renamed goes on with the dither that it had, and with its history.

    What was loaded does not follow the optimizer.
    """
    engine, fresh = stepped(), stepped(0)
    (saved,) = held(engine)["states"]
    renamed = copy.deepcopy(base_optimizer(engine).state_dict())
    (state,) = renamed["state"].values()
    for store in (state[which].store for which in MOMENTS):
        first, *others = store.table.pieces
        changed = replace(first, identity=12345, name="before")
        store.table = PieceTable((changed, *others), store.table.numel)
    base_optimizer(fresh).load_state_dict(renamed)
    (got,) = held(fresh)["states"]
    assert got["pieces"][0] == replace(saved["pieces"][0], identity=12345)
    assert got["pieces"][1:] == saved["pieces"][1:]
    assert_same(got["exp_avg"], saved["exp_avg"])
    take_step(fresh, 1)
    assert states_of(fresh)[0]["history"] < 53
    for which in MOMENTS:
        assert_same(plain(state[which]), saved[which])


@pytest.mark.parametrize("include", [[], *([one] for one in OffloadStateTypeEnum)], ids=str)
@on_ranks(2)
def test_checkpoint_loads_and_reports_stay_while_states_are_offloaded(include, tmp_path):
    """As with torch's AdamW: DeepSpeed takes away then what says which parts a rank holds."""
    engine = stepped(offload=None)
    engine.save_checkpoint(tmp_path, tag="saved")
    rows, before = base_optimizer(engine).memory_report().to_dicts(), held(engine)
    take_step(engine, 1)
    engine.offload_states(include=include or None)
    assert base_optimizer(engine).memory_report().to_dicts() == rows
    engine.load_checkpoint(tmp_path, tag="saved")
    engine.reload_states()
    assert_same(held(engine), before)


KINDS = [OffloadStateTypeEnum.hp_params, OffloadStateTypeEnum.optim_states]


@pytest.mark.parametrize("include", [None, *([one] for one in KINDS)], ids=str)
@on_ranks(2)
def test_states_of_zero3_that_moved_to_the_host_and_back_go_on_with_the_same_bits(include):
    """DeepSpeed refuses to move those of any but FusedAdam."""
    moved, stayed = (
        # DeepSpeed cannot move 16-bit weights some of which are frozen.
        make_engine(config(stage=3, offload=None, dtype={}), Bag().requires_grad_())
        for _ in range(2)
    )
    assert_steps_are_the_same(moved, stayed, 0)
    with page_locked() as memory:
        for step, pin_memory in enumerate([True, False, True], 1):
            moved.offload_states(include, pin_memory=pin_memory, non_blocking=step > 1)
            assert bool(memory.registered) is (include != KINDS[1:])
            assert all(
                state["exp_avg"].store.codes.dtype == torch.uint8 for state in states_of(moved)
            )
            moved.reload_states(non_blocking=step > 1)
            assert not moved.optimizer.offloaded_states
            assert_steps_are_the_same(moved, stayed, step)


@pytest.mark.gpu
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("pin_memory", [False, True])
@pytest.mark.parametrize("non_blocking", [False, True])
@on_ranks(max(1, torch.cuda.device_count()), device="cuda")
def test_gpu_states_that_were_offloaded_and_reloaded_go_on_as_those_that_stayed(
    stage, pin_memory, non_blocking
):
    moved, stayed = (stepped(offload=None, stage=stage) for _ in range(2))
    moved.offload_states(KINDS, pin_memory=pin_memory, non_blocking=non_blocking)
    moved.reload_states()
    assert_steps_are_the_same(moved, stayed, 1)


class Interrupt(Exception):
    """What the handler raises, as that of Ctrl-C does."""


# Both step in several parts: over groups, and over sub-groups.
@pytest.mark.parametrize("options", [{}, {"stage": 3, "zero": {"sub_group_size": 5000}}], ids=str)
@on_ranks(2)
def test_interrupt_in_an_engines_step_finds_it_done_and_counted(options):
    """All parts of it; a signal arrives after the first."""

    def groups(params):
        return [{"params": params[:3]}, {"params": params[3:]}]

    expected, engine = (stepped(groups=groups, **options) for _ in range(2))
    take_step(expected, 1)
    parts, found = [], []

    def handle(number, frame):
        found.append((engine.global_steps, held(engine)))
        raise Interrupt

    def interrupt(*_):
        parts.append(len(parts))
        if len(parts) == 1:
            signal.raise_signal(signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handle)
    hook = base_optimizer(engine).register_step_post_hook(interrupt)
    try:
        with pytest.raises(Interrupt):
            take_step(engine, 1)
    finally:
        hook.remove()
        signal.signal(signal.SIGUSR1, before)
    assert len(parts) >= 2
    assert_same(found, [(2, held(expected))])
    assert_steps_are_the_same(engine, expected, 2)
