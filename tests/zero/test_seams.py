# SPDX-License-Identifier: Apache-2.0
"""How zero8 fits into DeepSpeed: what is changed, for whom, and what is refused."""

import deepspeed
import pytest
import torch
from deepspeed.runtime import engine as engine_module
from deepspeed.runtime.zero import utils
from nests import assert_same
from ranks import on_ranks, run_ranks
from zero_worker import BF16_MASTERS, Bag, base_optimizer, config, held, make_engine, take_step

import zero8
from zero8.deepspeed import seam as seam_module
from zero8.deepspeed import seams
from zero8.deepspeed.seam import SEAMS
from zero8.environment import packages
from zero8.environment.packages import TESTED
from zero8.spec.adam import ADAM
from zero8.state.keywords import OWN_KEYS

FORWARD = {"zero8": {"step_in_forward": True}}


def offload(**options):
    return {"offload_optimizer": {"device": "cpu", "pin_memory": False, **options}}


REFUSED = {
    "zenflow": (
        config(stage=2, zero={"zenflow": {"topk_ratio": 0.1}}),
        ["zenflow", "process of its own", "remove"],
    ),
    "elastic_checkpoint": (
        config(stage=1, zero={"elastic_checkpoint": True}),
        ["elastic_checkpoint", "remove it", "--to zero"],
    ),
    "super_offload": (
        config(stage=3, offload=None, zero=offload(super_offload=True)),
        ["offload_optimizer.super_offload", "DeepSpeedCPUAdam", "set it to false"],
    ),
    "nvme in stage 2": (
        config(stage=2, offload=None, zero=offload(device="nvme", nvme_path="/nonexistent")),
        ['offload_optimizer.device "nvme" in ZeRO stage 2', "use stage 3", '"cpu"'],
    ),
    "nvme without a path": (
        config(stage=3, offload=None, zero=offload(device="nvme")),
        ['offload_optimizer.device "nvme" without "nvme_path"', "set it to a folder"],
    ),
    "settings of checkpoints": (
        config() | {"zero8": {"keep": 3}},
        ["unknown key 'keep'", "keep_checkpoints"],
    ),
    "step_in_forward as a number": (
        config(stage=3) | {"zero8": {"step_in_forward": 1}},
        ["step_in_forward: got 1, expected a bool"],
    ),
    "step_in_forward in stage 2": (config() | FORWARD, ["got ZeRO stage 2", "expected stage 3"]),
    "step_in_forward without offload": (
        config(stage=3, offload=None) | FORWARD,
        ["step_in_forward: got ZeRO stage 3 with offload_optimizer None", '"cpu" or "nvme"'],
    ),
    "step_in_forward with Muon": (
        config(stage=3, optimizer="Muon8bitBlockwise") | FORWARD,
        ["step_in_forward: got Muon8bitBlockwise", "exchanges matrices"],
    ),
    "unknown key": (config(beta1=0.9), ["unknown parameter 'beta1'", *ADAM.keywords, *OWN_KEYS]),
    "bad value": (config(block_size=100), ["block_size: got 100", "power of two"]),
}


@pytest.mark.parametrize("name", REFUSED)
@on_ranks(1)
def test_initialize_with_what_cannot_work_is_refused_with_reason_and_remedy(name):
    ds_config, parts = REFUSED[name]
    with pytest.raises(ValueError) as caught:
        make_engine(ds_config, Bag())
    assert all(part in str(caught.value) for part in parts), caught.value


@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(1)
def test_group_that_joins_later_is_refused_and_not_added(stage):
    optimizer = base_optimizer(make_engine(config(stage=stage), Bag()))
    groups = len(optimizer.param_groups)
    with pytest.raises(ValueError, match="pass all groups there"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(64, 64))]})
    assert len(optimizer.param_groups) == groups


def engines_of_both(folder):
    """Return what torch's AdamW holds before and after zero8 has been fitted in, which is once."""

    def adamw():
        engine = make_engine(config(optimizer="AdamW", torch_adam=True), Bag())
        return {"losses": [take_step(engine, step) for step in range(2)], **held(engine)}

    assert zero8.Adam8bitBlockwise not in utils.ZERO_SUPPORTED_OPTIMIZERS
    before = adamw()
    for _ in range(2):
        take_step(make_engine(config(dtype=BF16_MASTERS), Bag()), 0)
    assert utils.ZERO_SUPPORTED_OPTIMIZERS.count(zero8.Adam8bitBlockwise) == 1
    # An instance of both: patched for each, its saves would wait for themselves.
    bag, special = Bag(), type("Special", (zero8.Adam8bitBlockwise,), {})
    by_object = config() | {"optimizer": {}, "zero_force_ds_cpu_optimizer": False}
    optimizer = special(bag.parameters(), weight_decay=0.0)
    make_engine(by_object, bag, optimizer=optimizer).save_checkpoint(folder)
    with pytest.raises(AssertionError, match="DeepSpeedCPUAdam"):
        make_engine(config(optimizer="AdamW", torch_adam=True, dtype=BF16_MASTERS), Bag())
    return before, adamw()


def test_initialize_fits_zero8_in_once_and_for_our_optimizers_only(tmp_path):
    """In a process of its own, which has made no engine before."""
    ((before, after),) = run_ranks(engines_of_both, 1, tmp_path, folder=tmp_path / "saved")
    assert_same(after, before)


# --- Another DeepSpeed ---------------------------------------------------------------------------


@pytest.fixture
def fresh(monkeypatch):
    """Have no class been fitted in yet."""
    monkeypatch.setattr(utils, "ZERO_SUPPORTED_OPTIMIZERS", [torch.optim.Adam])
    monkeypatch.setattr(seams, "classes", [])
    monkeypatch.setattr(seam_module, "classes", seams.classes)


def renamed(self, optimizer):
    """A method whose parameters have other names than zero8 knows."""


MISSING = {
    "list gone": (utils, "ZERO_SUPPORTED_OPTIMIZERS", None),
    "method gone": (engine_module.DeepSpeedEngine, "_configure_zero_optimizer", None),
    "method differs": (engine_module.DeepSpeedEngine, "_do_optimizer_sanity_check", renamed),
}


@pytest.mark.parametrize("name", MISSING)
def test_install_without_a_seam_is_one_clear_error_and_changes_nothing(fresh, monkeypatch, name):
    owner, attribute, value = MISSING[name]
    if value is None and attribute in vars(owner):
        monkeypatch.delattr(owner, attribute)
    else:  # also where a base class has it
        monkeypatch.setattr(owner, attribute, value)
    before = [one.found() for one in SEAMS]
    supported = list(getattr(utils, "ZERO_SUPPORTED_OPTIMIZERS", ()))
    with pytest.raises(RuntimeError) as caught:
        seams.fit(zero8.Adam8bitBlockwise)
    message = str(caught.value)
    assert message.startswith(f"zero8 does not fit this DeepSpeed ({deepspeed.__version__}): ")
    assert all(tested in message for tested in TESTED["deepspeed"])
    assert attribute in message
    assert [one.found() for one in SEAMS] == before
    assert list(getattr(utils, "ZERO_SUPPORTED_OPTIMIZERS", ())) == supported


LOWEST, BEYOND = TESTED["deepspeed"]


@pytest.mark.parametrize(
    ("installed", "warned"), [("0.1", 1), (LOWEST, 0), (f"{LOWEST}+cpu", 0), (BEYOND, 1)]
)
def test_untested_version_of_deepspeed_warns_once(monkeypatch, recwarn, installed, warned):
    monkeypatch.setattr(packages, "version", lambda name: installed)
    packages.warn_if_untested.cache_clear()
    for _ in range(2):
        packages.warn_if_untested("deepspeed")
    packages.warn_if_untested.cache_clear()
    assert len(recwarn) == warned
    for warning in recwarn:
        assert all(known in str(warning.message) for known in (installed, LOWEST, BEYOND))
