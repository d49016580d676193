# SPDX-License-Identifier: Apache-2.0
"""`import torch` alone makes the optimizer known, and never fails because of it."""

import pytest
from processes import python


def slow(*values):
    """Return parameters of a test that run in `make test-slow` only: each is a process."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def run_python(code, autoload=None, **env):
    """Run code in a fresh process; return what it printed, as a list of lines, and its stderr."""
    done = python(code, DS_ACCELERATOR="cpu", TORCH_DEVICE_BACKEND_AUTOLOAD=autoload, **env)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


def test_import_torch_alone_registers_and_imports_no_deepspeed():
    lines, errors = run_python("""
import sys, torch
print(torch.optim.Adam8bitBlockwise.__module__)
print("deepspeed" in sys.modules, any(name.startswith("deepspeed.") for name in sys.modules))
import zero8
print(zero8.Adam8bitBlockwise is torch.optim.Adam8bitBlockwise)
""")
    assert lines == ["zero8.optimizer.elementwise", "False False", "True"]
    assert "zero8" not in errors


def test_autoload_switched_off_registers_at_import_zero8():
    lines, _ = run_python(
        """
import sys, torch
print(hasattr(torch.optim, "Adam8bitBlockwise"), "zero8" in sys.modules)
import zero8
print(torch.optim.Adam8bitBlockwise is zero8.Adam8bitBlockwise, torch.cuda.is_initialized())
slow = ("deepspeed", "torch.utils.cpp_extension", "torch.distributed.tensor")
print([name for name in slow if name in sys.modules])
""",
        autoload="0",
    )
    assert lines == ["False False", "True False", "[]"]


@pytest.mark.parametrize(
    "module", ["zero8.optimizer.elementwise", *slow("zero8.deepspeed.moment_tensor", "numpy")]
)
def test_broken_installation_warns_and_import_torch_succeeds(module):
    """None in sys.modules makes an import fail, here before torch is imported."""
    lines, errors = run_python(f"""
import sys
sys.modules[{module!r}] = None
import torch
print(torch.ones(2).sum().item(), hasattr(torch.optim, "Adam8bitBlockwise"))
""")
    assert lines == ["2.0 False"]
    assert "zero8 could not register itself" in errors
    assert module in errors


@pytest.mark.parametrize(
    "order",
    [
        "import zero8, deepspeed",
        *slow(
            "import deepspeed, zero8",
            "import torch, deepspeed",
            "import deepspeed.ops.op_builder.all_ops, zero8",
        ),
    ],
)
def test_op_is_listed_and_first_engine_known_to_its_optimizer_whatever_is_imported_first(order):
    """Without an import line only torch's autoload can be first."""
    lines, _ = run_python(
        f"""
{order}
import torch
from deepspeed.ops.op_builder import Zero8AdamBuilder, all_ops
print("listed:", type(all_ops.ALL_OPS["zero8_adam"]) is Zero8AdamBuilder)
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
store = torch.distributed.HashStore()
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
model = torch.nn.Linear(64, 64)
section = {{"type": "Adam8bitBlockwise", "params": {{"fp32_params": ["weight"]}}}}
config = {{"train_micro_batch_size_per_gpu": 1, "optimizer": section, "steps_per_print": 10**9}}
engine, *_ = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), config=config
)
engine.backward(engine(torch.ones(1, 64)).sum())
engine.step()
print([row["name"] for row in engine.basic_optimizer.memory_report().to_dicts()])
""",
        autoload=None if "zero8" not in order else "0",
        LOCAL_RANK="0",
    )
    assert "listed: True" in lines
    assert lines[-1] == "['weight', 'bias']"
