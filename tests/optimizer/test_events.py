# SPDX-License-Identifier: Apache-2.0
"""What happens to an optimizer between steps and must not show: event x algorithm.

Two equal optimizers step on the same gradients; something happens to one of them after two steps.
Both end with the same bits of parameters and states.
"""

import copy
import math
import pickle
from dataclasses import dataclass

import pytest
import torch
from int8_weights import int8_param
from nests import assert_same
from small_optimizers import OPTIONS, param, through_file

import zero8
from zero8.optimizer import widened
from zero8.spec.codec import CODECS

pytestmark = pytest.mark.usefixtures("one_torch_thread")
FP32, BF16, INT8 = torch.float32, torch.bfloat16, torch.int8
# Of 2 dimensions: ragged, narrow, small; then experts and a filter, a vector.
SHAPES = {"inner": (16, 300), "narrow": (600, 8), "small": (10, 20)}
OTHERS = {"experts": (3, 10, 256), "conv": (16, 32, 3, 3), "bias": (50,)}
ADAM, MUON = zero8.Adam8bitBlockwise, zero8.Muon8bitBlockwise

KINDS = {
    **{one.algorithm.name: (one, FP32, options) for one, options in OPTIONS.items()},
    "muon": (MUON, BF16, {}),
    "float32 moments": (ADAM, BF16, {"fp32_params": ["*"]}),
    "corrected": (ADAM, BF16, {"weight_correction_bits": 8}),
    "hash": (ADAM, BF16, {"stochastic_rounding": "hash", "bias_correction": False}),
    "nearest": (ADAM, BF16, {"stochastic_rounding": False, "block_size": 64}),
    **{codec: (ADAM, BF16, {"codec": codec, "seed": 7}) for codec in CODECS},
    "INT8 weights": (ADAM, INT8, {}),
    "INT8 weights in pieces": (zero8.SGD8bitBlockwise, INT8, {"momentum": 0.9}),
}


@dataclass
class Run:
    """Parameters by name, and their optimizer."""

    kind: str
    params: dict[str, torch.nn.Parameter]
    optimizer: torch.optim.Optimizer

    @classmethod
    def of(cls, kind: str, is_named: bool = True, lr: float = 0.01) -> "Run":
        made, dtype, options = KINDS[kind]
        shapes = SHAPES if dtype == INT8 else SHAPES | OTHERS
        params = {
            name: int8_param(param(*shape).detach())
            if dtype == INT8
            else param(*shape, dtype=dtype)
            for name, shape in shapes.items()
        }
        given = params.items() if is_named else params.values()
        return cls(kind, params, made(given, **options | {"lr": lr, "weight_decay": 0.1}))

    def values(self) -> list[torch.Tensor]:
        """The memory of all parameters."""
        params = self.params.values()
        if KINDS[self.kind][1] == INT8:
            return [part for p in params for part in (p.int_data, p.scale)]
        return [p.detach() for p in params]

    def step(self, grads) -> None:
        for p, grad in zip(self.params.values(), grads, strict=True):
            p.grad = grad.clone(memory_format=torch.preserve_format)
        self.optimizer.step()

    def resumed(self, saved: dict, is_named: bool = True) -> "Run":
        """Return another optimizer that has loaded a state dict."""
        other = Run.of(self.kind, is_named, lr=7.0)
        for mine, theirs in zip(other.values(), self.values(), strict=True):
            mine.copy_(theirs)
        other.optimizer.load_state_dict(saved)
        return other


def gradients(kind: str) -> list[list[torch.Tensor]]:
    """Return the gradients of four steps."""
    generator = torch.Generator().manual_seed(1)
    params = Run.of(kind).params.values()
    return [[torch.randn(p.shape, generator=generator).to(p.dtype) for p in params] for _ in "1234"]


# --- Events: each gets a run and the gradients of the rest, and returns the run that has gone on --


def goes_on(run, rest):
    for grads in rest:
        run.step(grads)
    return run


def saved_without_names(run, rest):
    saved = through_file(run.optimizer.state_dict())
    del saved["param_groups"][0]["param_names"]
    return goes_on(run.resumed(saved, is_named=False), rest)


def loaded_again(run, rest):
    run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    run.optimizer.__setstate__(run.optimizer.__getstate__())
    return goes_on(run, rest)


def moved_params(run, rest):
    """As swapped out, and back to another place."""
    for p in run.params.values():
        kept, p.data = p.data, torch.zeros(p.shape, dtype=p.dtype)
        p.data = kept.clone()
    return goes_on(run, rest)


def transposed(x):
    return x.transpose(0, -1).contiguous().transpose(0, -1) if x.ndim > 1 else x


def states(change):
    """Return an event: a function, of a state, a key and its tensor, is called for all of these."""

    def event(run, rest):
        for state in run.optimizer.state.values():
            for key, value in list(state.items()):
                if isinstance(value, torch.Tensor):
                    change(state, key, value)
        return goes_on(run, rest)

    return event


def transposed_params(run, rest):
    for p in run.params.values():
        p.data = transposed(p.data)
    return goes_on(run, rest)


def other_gradients(run, rest):
    """Of filters channels_last, of others every second element."""
    of_filters = {"memory_format": torch.channels_last}
    for grads in rest:
        run.step([g.to(**of_filters) if g.ndim == 4 else transposed(g) for g in grads])
        for p, g in zip(run.params.values(), grads, strict=True):
            p.grad = torch.stack([g, g], -1)[..., 0]
    return run


def no_gradients(run, rest):
    run.optimizer.zero_grad()
    assert all(p.grad is None for p in run.params.values())
    assert run.optimizer.step(lambda: 7.0) == 7.0
    return goes_on(run, rest)


def compiled(run, rest):
    """Run as it is: records of addresses are nothing that torch.compile could trace."""
    run.optimizer.step = torch.compile(run.optimizer.step, backend="eager")
    goes_on(run, rest)
    del run.optimizer.step
    return run


def in_autocast(run, rest):
    with torch.autocast("cpu", BF16):
        return goes_on(run, rest)


def forget_tables():
    """Have codecs make their tables anew."""
    for codec in CODECS.values():
        for code in (codec.of_signed, codec.of_unsigned):
            for part in (code, getattr(code, "narrow", code), getattr(code, "wide", code)):
                for table in ("levels", "thresholds"):
                    vars(part).pop(table, None)


def under(set_default, value, usual):
    """Return an event: other defaults of torch, for steps and a load."""

    def event(run, rest):
        forget_tables()
        set_default(value)
        try:
            run.optimizer.load_state_dict(run.optimizer.state_dict())
            return goes_on(run, rest)
        finally:
            set_default(usual)
            forget_tables()

    return event


def on_threads(run, rest):
    torch.set_num_threads(3)  # one_torch_thread restores it
    return goes_on(run, rest)


FEW = ("adam", "muon", "corrected", "log6", "INT8 weights")
FLOATS = FEW[:4]  # the stand-in for INT8 weights can be stepped and saved, and nothing else
EVENTS = {
    "saved to a file": (
        lambda run, rest: goes_on(run.resumed(through_file(run.optimizer.state_dict())), rest),
        KINDS,
    ),
    "loaded again": (loaded_again, KINDS),
    "saved without names": (saved_without_names, ("adam", "corrected", "log6")),
    "deep copy": (lambda run, rest: goes_on(copy.deepcopy(run), rest), FLOATS),
    "pickle": (lambda run, rest: goes_on(pickle.loads(pickle.dumps(run)), rest), FLOATS),
    "moved states": (states(lambda state, key, x: state.update({key: x.clone()})), FEW),
    "moved states in place": (states(lambda _, __, x: setattr(x, "data", x.data.clone())), FEW),
    "transposed states": (states(lambda state, key, x: state.update({key: transposed(x)})), FEW),
    "no gradients": (no_gradients, FEW),
    "threads": (on_threads, FEW),
    "moved parameters": (moved_params, FLOATS),
    "transposed parameters": (transposed_params, FLOATS),
    "strides of gradients": (other_gradients, FLOATS),
    "compiled": (compiled, ("adam",)),
    "autocast": (in_autocast, ("adam", "muon")),
    "default device": (under(torch.set_default_device, "meta", None), FLOATS),
    "default dtype": (under(torch.set_default_dtype, BF16, FP32), FLOATS),
}
ROWS = [(event, kind) for event, (_, kinds) in EVENTS.items() for kind in kinds]


@pytest.mark.parametrize(("event", "kind"), ROWS)
def test_steps_after_an_event_are_those_of_an_optimizer_to_which_nothing_happened(
    event, kind, monkeypatch
):
    if "pieces" in kind:  # as a device does whose kernel takes no INT8 weights
        monkeypatch.setattr(widened, "is_widened", lambda device: True)
        monkeypatch.setattr(widened, "MOST_ELEMENTS", 2000)
    first, second, *rest = gradients(kind)
    plain, run = Run.of(kind), Run.of(kind)
    for one in (plain, run):
        one.optimizer.param_groups[0]["note"] = ["of another program", {}]
        one.step(first)
        one.step(second)
    goes_on(plain, rest)
    run = EVENTS[event][0](run, rest)
    assert_same(run.values(), plain.values())
    # Moments that are moved count as assigned ones, of which the bound on updates is unknown.
    forgotten = {"history"} if "states" in event else set()
    assert run.optimizer.param_groups[0]["note"] == ["of another program", {}]
    states = [list(one.optimizer.state_dict()["state"].values()) for one in (run, plain)]
    kept = [[{k: s[k] for k in s.keys() - forgotten} for s in of_run] for of_run in states]
    assert_same(*kept)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        *((kind, math.nan) for kind in KINDS if kind != "muon"),
        *(("adam", value) for value in (math.inf, -(2.0**63))),
    ],
)
def test_gradient_that_is_not_finite_stops_its_block_only(kind, value):
    """And raises with names after the step, which counts; the run goes on."""
    grads, others = gradients(kind)[:2]
    clean, run = Run.of(kind), Run.of(kind)
    clean.step(grads)
    before = run.values()[0].clone()
    bad = [grad.clone() for grad in grads]
    bad[0][3, 290] = bad[0][5, 0] = value
    name = r"inner \(.* blocks\).*catch this error.*detect_anomaly"
    with pytest.raises(FloatingPointError, match=f"in 1 parameter.*{name}"):
        run.step(bad)
    assert run.optimizer.nonfinite_blocks >= 2
    is_stopped = run.values()[0] == before
    if KINDS[kind][1] != INT8 and kind not in ("float32 moments", "nearest"):
        left = torch.zeros_like(is_stopped)
        left[3, 256:] = left[5, :256] = True
        assert torch.equal(run.values()[0][left], before[left])
        assert torch.equal(run.values()[0][~left], clean.values()[0][~left])
    assert_same(run.values()[2:], clean.values()[2:])
    assert {state["step"] for state in run.optimizer.state.values()} == {1}
    run.optimizer.load_state_dict(run.optimizer.state_dict())
    run.step(others)
