# SPDX-License-Identifier: Apache-2.0
"""The optimizer over parameters on a GPU, for which the CPU stands in: fake_cuda.py."""

import copy
import itertools
from types import SimpleNamespace

import pytest
import torch
from small_optimizers import assert_equal, named_params
from torch import nn

import zero8
from zero8.environment import ranks
from zero8.optimizer import stepper
from zero8.optimizer.check import check_tensors
from zero8.optimizer.states import HoldsStates
from zero8.spec.codec import CODECS

pytestmark = pytest.mark.usefixtures("one_torch_thread")
FP32, BF16 = torch.float32, torch.bfloat16
HYPER = {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1}


def made(
    dtype=FP32, device="cpu", **settings
) -> tuple[list[nn.Parameter], zero8.Adam8bitBlockwise]:
    """Return matrices with ragged rows, a vector with float32 moments, and their optimizer."""
    params = named_params({"a": (64, 100), "b": (33,), "c": (70, 300)}, dtype)
    for p in params.values():
        p.data = p.data.to(device)
    return list(params.values()), zero8.Adam8bitBlockwise(params.items(), **(HYPER | settings))


def set_grads(params: list[nn.Parameter], number: int) -> None:
    """Set the gradients of a step, in the memory that gradients have already if they do."""
    generator = torch.Generator().manual_seed(100 + number)
    for p in params:
        grad = torch.randn(p.shape, generator=generator).to(p.device, p.dtype)
        p.grad = grad if p.grad is None else p.grad.copy_(grad)


def states_of(optimizer) -> list[torch.Tensor]:
    entries = [value for state in optimizer.state.values() for value in state.values()]
    return [torch.as_tensor(value).cpu() for value in entries]


def assert_same(ours, theirs) -> None:
    assert_equal([p.cpu() for p in ours[0]], theirs[0])
    assert_equal(states_of(ours[1]), states_of(theirs[1]))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    ("dtype", "settings"),
    [(FP32, {}), (BF16, {}), (BF16, {"weight_correction_bits": 8}), (FP32, {"block_size": 64})],
    ids=["fp32", "bf16", "corrected", "small blocks"],
)
def test_cuda_optimizer_steps_equal_those_on_the_cpu(gpu, codec, dtype, settings):
    mine, theirs = (made(dtype, codec=codec, **settings) for _ in range(2))
    for params, _ in (mine, theirs):
        params[2].data = params[2].data.t().contiguous().t()
    for number in range(4):
        for params, optimizer in (mine, theirs):
            gpu.is_on = params is mine[0]
            set_grads(params, number)
            optimizer.step()
    assert_same(mine, theirs)
    assert gpu.launches == 4 * 2  # those together, and the one in another order


def test_cuda_optimizer_saved_on_one_device_resumes_on_the_other(gpu):
    mine, theirs = made(), made()
    for number in range(4):
        for params, optimizer in (mine, theirs):
            gpu.is_on = number % 2 == 0 and params is mine[0]
            set_grads(params, number)
            optimizer.step()
        mine[1].load_state_dict(copy.deepcopy(mine[1].state_dict()))
    assert_same(mine, theirs)


def test_cuda_optimizer_parameters_of_two_devices_step_in_a_launch_each(gpu, monkeypatch):
    mine, theirs = made(), made()
    set_grads(mine[0], 0)
    set_grads(theirs[0], 0)
    theirs[1].step()
    prepared, devices = stepper.prepared, itertools.cycle([0, 1])

    def on_two_devices(*args):
        entry = prepared(*args)
        entry.seen["kind"][0] += next(devices) << 32
        return entry

    monkeypatch.setattr(stepper, "prepared", on_two_devices)
    gpu.launches = 0
    mine[1].step()
    assert gpu.launches == 2
    assert_same(mine, theirs)


# --- Non-finite gradients ------------------------------------------------------------------------


def step_with_nan(params, optimizer) -> None:
    set_grads(params, 0)
    params[2].grad[3, 5] = torch.nan
    params[2].grad[30, 5] = torch.inf
    optimizer.step()


def test_cuda_optimizer_nonfinite_gradients_are_told_when_the_gpu_has_come_so_far(gpu):
    params, optimizer = made()
    gpu.is_behind = True
    before = params[2].detach().clone()
    step_with_nan(params, optimizer)
    changed = (params[2] != before)[3]
    assert not changed[:256].any() and changed[256:].all()
    for number in (1, 2):
        set_grads(params, number)
        optimizer.step()
    assert optimizer.nonfinite_blocks == 0
    gpu.is_behind = False
    set_grads(params, 3)
    before = params[0].detach().clone()
    with pytest.raises(FloatingPointError, match=r"in 1 parameter\(s\): c \(2 blocks\)"):
        optimizer.step()
    assert (params[0] != before).any()  # the step has been taken
    assert optimizer.nonfinite_blocks == 2 and gpu.waits == 0
    assert optimizer.state[params[0]]["step"] == 4
    optimizer.step()


def test_cuda_optimizer_check_finite_waits_for_the_gpu(gpu, caplog):
    params, optimizer = made()
    optimizer.check_finite()
    gpu.is_behind = True
    step_with_nan(params, optimizer)
    assert gpu.waits == 0
    with pytest.raises(FloatingPointError, match="2 blocks met a non-finite gradient"):
        optimizer.check_finite()
    assert gpu.waits == 1
    assert "non-finite gradient or moment: c: 2 blocks" in caplog.text


def test_cuda_optimizer_of_several_ranks_logs_instead_of_raising(gpu, monkeypatch, caplog):
    """GPUs of ranks are not equally far: one would raise, the others wait in a collective."""
    params, optimizer = made()
    monkeypatch.setattr(ranks, "num_ranks", lambda: 2)
    monkeypatch.setattr(HoldsStates, "_are_on_gpus", lambda self: True)
    step_with_nan(params, optimizer)
    assert optimizer.nonfinite_blocks == 2
    assert "non-finite gradient or moment: c: 2 blocks" in caplog.text
    monkeypatch.setattr(HoldsStates, "_are_on_gpus", lambda self: False)
    with pytest.raises(FloatingPointError):
        step_with_nan(params, optimizer)


# --- What is refused -----------------------------------------------------------------------------


def test_cuda_step_inside_the_capture_of_a_graph_is_refused_and_changes_nothing(gpu):
    params, optimizer = made()
    set_grads(params, 0)
    optimizer.step()
    before = [x.clone() for x in (*params, *states_of(optimizer))]
    gpu.is_capturing = True
    with pytest.raises(RuntimeError, match="capture the forward and the backward only"):
        optimizer.step()
    assert_equal([*params, *states_of(optimizer)], before)


def test_cuda_params_on_other_devices_are_refused():
    p = nn.Parameter(torch.ones(64, 100, device="meta"))
    p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match="got a parameter on meta, expected one on the CPU or"):
        check_tensors("w", p, p.grad)


def on(*names: str) -> list[SimpleNamespace]:
    return [SimpleNamespace(device=torch.device(name)) for name in names]


def test_cuda_params_of_rocm_are_refused(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(ValueError, match="got a parameter on cuda:0 of ROCm"):
        check_tensors("w", *on("cuda:0", "cuda:0"))


@pytest.mark.parametrize("devices", [("cuda:0", "cpu"), ("cuda:0", "cuda:1"), ("cpu", "cuda:0")])
def test_cuda_gradients_on_another_device_are_refused(devices):
    expected = f"got a gradient on {devices[1]}, the parameter is on {devices[0]}"
    with pytest.raises(ValueError, match=expected):
        check_tensors("w", *on(*devices))
