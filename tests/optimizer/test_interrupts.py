# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C: a step is done and noted, or not begun; test_torch_contract.py interrupts loads."""

import copy
import signal

import pytest
from nests import assert_same
from small_optimizers import assert_equal, run, set_grads, small_model

from zero8 import Adam8bitBlockwise
from zero8.environment.interrupts import put_off
from zero8.optimizer.call import Call

SIGINT, SIGTERM, SIGUSR1 = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1


@pytest.fixture(autouse=True)
def ctrl_c():
    """Let SIGINT raise KeyboardInterrupt: shells start what runs in the background without it."""
    before = signal.signal(SIGINT, signal.default_int_handler)
    yield
    signal.signal(SIGINT, before)


def assert_alike(params, optimizers):
    assert_equal(*params)
    assert_same(*(optimizer.state_dict()["state"] for optimizer in optimizers))


def test_interrupt_as_the_kernel_returns_leaves_a_step_that_is_done_and_noted(monkeypatch):
    models = [small_model(), small_model()]
    optimizers = [Adam8bitBlockwise(model.named_parameters(), lr=0.1) for model in models]
    params = [list(model.parameters()) for model in models]
    for one, optimizer in zip(params, optimizers, strict=True):
        run(optimizer, one, 1)
        set_grads(one, 1)
    optimizers[1].step()
    taken = Call.take

    def interrupted(self, *args):
        result = taken(self, *args)
        signal.raise_signal(SIGINT)
        return result

    with monkeypatch.context() as patch:
        patch.setattr(Call, "take", interrupted)
        with pytest.raises(KeyboardInterrupt):
            optimizers[0].step()
    assert_alike(params, optimizers)
    saved = copy.deepcopy(optimizers[0].state_dict())  # as a handler of Ctrl-C would
    resumed = Adam8bitBlockwise([("0", p) for p in params[0]])
    resumed.load_state_dict(saved)
    for one, optimizer in zip(params, (resumed, optimizers[1]), strict=True):
        run(optimizer, one, 2, start=2)
    assert_alike(params, (resumed, optimizers[1]))


@pytest.fixture
def called():
    """Handle three signals by noting them, one of them by raising, and put back what was."""
    seen = []

    def note(number, frame):
        seen.append(number)

    def fail(number, frame):
        seen.append(number)
        raise ZeroDivisionError

    before = {n: signal.getsignal(n) for n in (SIGINT, SIGTERM, SIGUSR1)}
    for number, handler in ((SIGINT, note), (SIGTERM, fail), (SIGUSR1, note)):
        signal.signal(number, handler)
    yield seen
    for number, handler in before.items():
        signal.signal(number, handler)


def test_put_off_calls_all_handlers_after_the_block_and_puts_them_back(called):
    before = [signal.getsignal(n) for n in signal.valid_signals()]
    done = False
    with pytest.raises(ZeroDivisionError), put_off():
        for number in (SIGINT, SIGTERM, SIGUSR1, SIGINT):
            signal.raise_signal(number)
        assert called == []
        done = True
    assert done and called == [SIGINT, SIGTERM, SIGUSR1, SIGINT]
    assert [signal.getsignal(n) for n in signal.valid_signals()] == before
