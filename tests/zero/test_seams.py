# SPDX-License-Identifier: Apache-2.0
"""How zero8 fits into DeepSpeed: what is changed, for whom, and what is refused."""

import warnings

import deepspeed
import pytest
import torch
from deepspeed.runtime import engine as engine_module
from deepspeed.runtime.swap_tensor.optimizer_utils import OptimizerSwapper
from deepspeed.runtime.zero import utils
from nests import difference
from ranks import error_of, run_ranks
from zero_worker import Bag, base_optimizer, config, held, make_engine, take_step

import zero8
from zero8.deepspeed import seam as seam_module
from zero8.deepspeed import seams, swapper  # noqa: F401 - it declares what it overrides
from zero8.deepspeed.seam import SEAMS, Seam, of_zero
from zero8.environment import versions
from zero8.environment.versions import TESTED
from zero8.spec.adam import ADAM
from zero8.state.keywords import OWN_KEYS

BF16_MASTERS = {"bf16_master_weights_and_grads": True}


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
    "unknown key": (config(beta1=0.9), ["unknown parameter 'beta1'", *ADAM.keywords, *OWN_KEYS]),
    "amsgrad": (config(amsgrad=True), ["amsgrad: got True", "third moment"]),
    "bad value": (config(block_size=100), ["block_size: got 100", "power of two"]),
    "fp32_params as a string": (config(fp32_params="*embed*"), ["fp32_params", "list"]),
}


def adamw():
    """Train torch's AdamW in DeepSpeed for two steps."""
    engine = make_engine(config(optimizer="AdamW", torch_adam=True), Bag())
    losses = [take_step(engine, step) for step in range(2)]
    return {"losses": losses, **held(engine)}


def try_everything(refused):
    """Return what engines do before and after zero8 has been fitted in."""
    result = {"fitted at first": zero8.Adam8bitBlockwise in utils.ZERO_SUPPORTED_OPTIMIZERS}
    result["adamw before"] = adamw()
    result["errors"] = {
        name: error_of(make_engine, ds_config, Bag()) for name, ds_config in refused.items()
    }
    for _ in range(2):
        engine = make_engine(config(), Bag())
        take_step(engine, 0)
    for stage in (2, 3):
        optimizer = base_optimizer(make_engine(config(stage=stage), Bag()))
        new = {"params": [torch.nn.Parameter(torch.ones(64, 64))]}
        groups = len(optimizer.param_groups)
        result[f"joins stage {stage}"] = error_of(optimizer.add_param_group, new)
        assert len(optimizer.param_groups) == groups
    result["fitted"] = utils.ZERO_SUPPORTED_OPTIMIZERS.count(zero8.Adam8bitBlockwise)
    result["adamw after"] = adamw()
    result["adamw bf16 masters"] = error_of(
        make_engine, config(optimizer="AdamW", torch_adam=True, dtype=BF16_MASTERS), Bag()
    )
    result["ours bf16 masters"] = error_of(make_engine, config(dtype=BF16_MASTERS), Bag())
    return result


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    refused = {name: ds_config for name, (ds_config, _) in REFUSED.items()}
    return run_ranks(try_everything, 1, tmp_path_factory.mktemp("seams"), refused=refused)[0]


@pytest.mark.parametrize("name", REFUSED)
def test_initialize_with_what_cannot_work_is_refused_with_reason_and_remedy(run, name):
    kind, message = run["errors"][name]
    assert kind == "ValueError"
    for part in REFUSED[name][1]:
        assert part in message


def test_initialize_fits_zero8_in_once_and_for_our_optimizers_only(run):
    assert (run["fitted at first"], run["fitted"]) == (False, 1)
    assert difference(run["adamw before"], run["adamw after"]) == ""
    kind, message = run["adamw bf16 masters"]
    assert kind == "AssertionError" and "DeepSpeedCPUAdam" in message
    assert run["ours bf16 masters"] is None
    for stage in (2, 3):
        kind, message = run[f"joins stage {stage}"]
        assert kind == "ValueError" and "pass all groups there" in message


# --- Seams, on a stand-in for DeepSpeed ----------------------------------------------------------


class Ours:
    """Stands for the optimizer class that is fitted in."""


class Theirs:
    """Stands for a class of DeepSpeed's."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self, *args, **kwargs):
        return args, kwargs


def patched(original, theirs, *args, **kwargs):
    return "patched", original(theirs, *args, **kwargs)


@pytest.fixture
def fresh(monkeypatch):
    """Have no class been fitted in yet."""
    monkeypatch.setattr(utils, "ZERO_SUPPORTED_OPTIMIZERS", [torch.optim.Adam])
    monkeypatch.setattr(seams, "classes", [])
    monkeypatch.setattr(seam_module, "classes", seams.classes)


def test_install_patches_once_for_ours_and_leaves_others_to_deepspeed(fresh, monkeypatch):
    """A subclass is an instance of both: patched for each, its saves would wait for themselves."""
    theirs = type("Theirs", (Theirs,), {})
    monkeypatch.setitem(globals(), "Fitted", theirs)
    declared = Seam(f"{__name__}:Fitted", "step", (), "why", patched, of_zero)
    monkeypatch.setattr(seams, "SEAMS", [declared])
    special = type("Special", (Ours,), {})
    assert declared.state == "present"
    for optimizer_class in (special, Ours, Ours):
        seams.fit(optimizer_class)
    assert declared.state == "installed"
    assert utils.ZERO_SUPPORTED_OPTIMIZERS == [torch.optim.Adam, special, Ours]
    plain = (1,), {"key": 2}
    for optimizer in (Ours(), special()):
        assert theirs(optimizer).step(1, key=2) == ("patched", plain)
    assert theirs(object()).step(1, key=2) == plain


def renamed(self, optimizer):
    """A method whose parameters have other names than zero8 knows."""


MISSING = {
    "list gone": (utils, "ZERO_SUPPORTED_OPTIMIZERS", None),
    "method gone": (engine_module.DeepSpeedEngine, "_configure_zero_optimizer", None),
    "method differs": (engine_module.DeepSpeedEngine, "_do_optimizer_sanity_check", renamed),
    "overridden method differs": (OptimizerSwapper, "_get_state_tensors", renamed),
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
        seams.fit(Ours)
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
def test_install_into_an_untested_version_warns_once(fresh, monkeypatch, installed, warned):
    monkeypatch.setattr(versions, "version", lambda name: installed)
    monkeypatch.setattr(seams, "SEAMS", [])
    versions.warn_if_untested.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for optimizer_class in (Ours, Ours, type("Another", (), {})):
            seams.fit(optimizer_class)
    versions.warn_if_untested.cache_clear()
    assert len(caught) == warned
    for warning in caught:
        assert all(known in str(warning.message) for known in (installed, LOWEST, BEYOND))
