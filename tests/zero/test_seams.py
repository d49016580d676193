# SPDX-License-Identifier: Apache-2.0
"""How zero8 fits into DeepSpeed: what is changed, for whom, and what is refused."""

import importlib
import inspect
import warnings
from functools import partial
from types import SimpleNamespace

import deepspeed
import pytest
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.runtime import base_optimizer as zero_base
from deepspeed.runtime import engine as engine_module
from deepspeed.runtime.swap_tensor.optimizer_utils import OptimizerSwapper
from deepspeed.runtime.swap_tensor.pipelined_optimizer_swapper import PipelinedOptimizerSwapper
from deepspeed.runtime.zero import stage3, stage_1_and_2, utils
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from nests import difference
from ranks import error_of, run_ranks
from zero_worker import Bag, base_optimizer, config, held, make_engine, take_step

import zero8
from zero8.deepspeed import constructing, gradients, seams, swapper
from zero8.deepspeed import seam as seam_module
from zero8.deepspeed.seam import of_engine, of_zero
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
    "elastic_checkpoint, stage 3": (
        config(stage=3, zero={"elastic_checkpoint": True}),
        ["elastic_checkpoint", "remove it", "--to zero"],
    ),
    "super_offload": (
        config(stage=3, offload=None, zero=offload(super_offload=True)),
        ["offload_optimizer.super_offload", "DeepSpeedCPUAdam", "set it to false"],
    ),
    "ratio": (
        config(stage=3, offload=None, zero=offload(ratio=0.5)),
        ["offload_optimizer.ratio 0.5", "another optimizer", "set it to 1.0"],
    ),
    "nvme in stage 2": (
        config(stage=2, offload=None, zero=offload(device="nvme", nvme_path="/nonexistent")),
        ['offload_optimizer.device "nvme" in ZeRO stage 2', "use stage 3", '"cpu"'],
    ),
    "nvme without a path": (
        config(stage=3, offload=None, zero=offload(device="nvme")),
        ['offload_optimizer.device "nvme" without "nvme_path"', "set it to a folder"],
    ),
    "fp16 masters": (
        config(stage=2) | {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}},
        ["fp16_master_weights_and_grads", "leave it out", "bf16_master_weights_and_grads"],
    ),
    "unknown key": (config(beta1=0.9), ["unknown parameter 'beta1'", *ADAM.keywords, *OWN_KEYS]),
    "amsgrad": (config(amsgrad=True), ["amsgrad: got True", "third moment"]),
    "bad value": (config(block_size=100), ["block_size: got 100", "power of two"]),
    "fp32_params as a string": (config(fp32_params="*embed*"), ["fp32_params", "list"]),
}
# Every key of DeepSpeed's Adam and AdamW, as their documentation has them.
ALL_KEYS = {
    "betas": [0.8, 0.99],
    "eps": 1e-6,
    "torch_adam": True,
    "adam_w_mode": True,
    "bias_correction": True,
    "set_grad_none": True,
    "amsgrad": False,
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
        engine = make_engine(config(**ALL_KEYS), Bag())
        take_step(engine, 0)
    for stage in (2, 3):
        optimizer = base_optimizer(make_engine(config(stage=stage), Bag()))
        new = {"params": [torch.nn.Parameter(torch.ones(64, 64))]}
        groups = len(optimizer.param_groups)
        result[f"joins stage {stage}"] = error_of(optimizer.add_param_group, new)
        assert len(optimizer.param_groups) == groups
    group = base_optimizer(engine).param_groups[0]
    result["group"] = {key: value for key, value in group.items() if key != "params"}
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


@pytest.mark.parametrize("stage", [2, 3])
def test_group_that_joins_under_zero_is_refused_with_the_way_to_add_it(run, stage):
    kind, message = run[f"joins stage {stage}"]
    assert kind == "ValueError" and "pass all groups there" in message


def test_initialize_fits_zero8_in_once_and_not_before_it_is_needed(run):
    assert run["fitted at first"] is False
    assert run["fitted"] == 1


def test_adamw_is_the_same_after_zero8_was_fitted_in(run):
    assert difference(run["adamw before"], run["adamw after"]) == ""


def test_bf16_masters_with_offload_stay_refused_for_other_optimizers_only(run):
    kind, message = run["adamw bf16 masters"]
    assert kind == "AssertionError"
    assert "DeepSpeedCPUAdam" in message
    assert run["ours bf16 masters"] is None


def test_initialize_with_every_key_of_deepspeeds_adamw_uses_their_values(run):
    assert run["group"]["betas"] == [0.8, 0.99]
    assert run["group"]["eps"] == 1e-6
    assert run["group"]["decoupled_weight_decay"] is True


@pytest.mark.parametrize("adam", [DeepSpeedCPUAdam, FusedAdam, torch.optim.AdamW])
def test_each_key_of_other_adams_is_served_or_refused_with_its_reason(adam):
    for key, parameter in inspect.signature(adam).parameters.items():
        if parameter.default is parameter.empty:
            continue
        weight = torch.nn.Parameter(torch.zeros(2))
        try:
            zero8.Adam8bitBlockwise([weight], **{key: parameter.default})
        except ValueError as error:
            assert str(error).startswith(f"{key}: ")
            assert (adam, key) == (DeepSpeedCPUAdam, "fp32_optimizer_states")


# --- install, on stand-ins for DeepSpeed's classes -----------------------------------------------


class Ours:
    """Stands for the optimizer class that is fitted in."""


def stand_in_for(name, parameters):
    """Return a method of these parameters that returns what it was called with."""

    def method(*args, **kwargs):
        return f"{name} of DeepSpeed", args, kwargs

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    names = ["self", *(one for one in parameters if one != "self")]
    method.__signature__ = inspect.Signature(
        [inspect.Parameter(one, kind, default=None) for one in names]
    )
    return method


@pytest.fixture
def stand_ins(monkeypatch):
    """Put stand-ins where DeepSpeed's members are that zero8 patches; return the classes by name.

    Those whose methods zero8 overrides, the swappers, stay.
    """
    made = {}
    for seam in seams.SEAMS:
        module, _, class_name = seam.owner.partition(":")
        method = stand_in_for(seam.name, seam.parameters)
        if class_name and "swap_tensor" not in module:
            if class_name not in made:
                made[class_name] = type(class_name, (), {})
                monkeypatch.setattr(importlib.import_module(module), class_name, made[class_name])
            setattr(made[class_name], seam.name, method)
        elif seam.patch and not class_name:
            monkeypatch.setattr(f"{module}.{seam.name}", method)
    monkeypatch.setattr(utils, "ZERO_SUPPORTED_OPTIMIZERS", [torch.optim.Adam])
    monkeypatch.setattr(seams, "classes", [])
    monkeypatch.setattr(seam_module, "classes", seams.classes)
    return made


def made(stand_in, **attributes):
    """Return an object of a stand-in with attributes."""
    one = stand_in()
    vars(one).update(attributes)
    return one


def engine_of(stand_ins, force=True, **zero_options):
    zero_config = DeepSpeedZeroConfig(**zero_options)
    return made(
        stand_ins["DeepSpeedEngine"],
        module=torch.nn.Module(),
        basic_optimizer=None,
        param_names={},
        zero_force_ds_cpu_optimizer=lambda: force,
        zero_use_cpu_optimizer=lambda: zero_config.offload_optimizer is not None,
        _config=SimpleNamespace(zero_config=zero_config, _param_dict={}),
    )


def seam_objects():
    """Return what is where zero8 patches DeepSpeed, but for the row that imports put in."""
    return [seam.found() for seam in seams.SEAMS if seam.without and seam.name != "ALL_OPS"]


def test_install_patches_what_is_declared_and_nothing_else(stand_ins):
    table = [seam for seam in seams.SEAMS if seam.name != "ALL_OPS"]  # by the import of DeepSpeed
    assert {seam.state for seam in table} == {"present"}
    seams.fit(Ours)
    for seam in table:
        is_expected = seam.without and not seam.is_early and seam.patch
        assert seam.state == ("installed" if is_expected else "present"), seam
    seams.install_early(None)
    for seam in table:
        assert seam.state == ("installed" if seam.patch else "present"), seam


def test_seams_are_declared_once_each():
    labels = [seam.label for seam in seams.SEAMS if seam.without]
    assert len(labels) == len(set(labels))


def test_install_twice_equals_once(stand_ins):
    original = seam_objects()
    seams.fit(Ours)
    once = seam_objects()
    seams.fit(Ours)
    assert seam_objects() == once != original
    assert utils.ZERO_SUPPORTED_OPTIMIZERS == [torch.optim.Adam, Ours]


def test_install_for_classes_of_one_base_patches_once(stand_ins):
    """A subclass is an instance of both: patched for each, its saves would wait for themselves."""
    special = type("Special", (Ours,), {})
    seams.fit(special)
    once = seam_objects()
    seams.fit(Ours)
    assert seam_objects() == once
    assert utils.ZERO_SUPPORTED_OPTIMIZERS == [torch.optim.Adam, special, Ours]


def test_installed_patches_of_methods_leave_other_optimizers_to_deepspeed(stand_ins):
    """The stand-ins have nothing to look at: touching it would fail."""
    seams.fit(Ours)
    left = 0
    for seam in seams.SEAMS:
        if seam.optimizer in (of_zero, of_engine):
            owner = made(
                stand_ins[seam.owner.partition(":")[2]], optimizer=object(), basic_optimizer=None
            )
            found = getattr(owner, seam.name)("an argument", key="another")
            expected = (owner, "an argument"), {"key": "another"}
            assert found == (f"{seam.name} of DeepSpeed", *expected)
            left += 1
    assert left > 30


def test_installed_patches_of_exact_classes_leave_variants_to_deepspeed(stand_ins):
    seams.fit(Ours)
    for seam in seams.SEAMS:
        if seam.exactly:
            variant = type("Variant", (stand_ins[seam.owner.partition(":")[2]],), {})
            owner = made(variant, optimizer=Ours())
            assert getattr(owner, seam.name)() == (f"{seam.name} of DeepSpeed", (owner,), {})


def test_installed_mode_check_refuses_for_ours_only_and_still_asks_deepspeed(stand_ins):
    seams.fit(Ours)
    refused = engine_of(stand_ins, stage=3, offload_optimizer={"device": "cpu", "ratio": 0.5})
    with pytest.raises(ValueError, match="ratio"):
        refused._do_optimizer_sanity_check(Ours())
    checked = "_do_optimizer_sanity_check of DeepSpeed"
    assert refused._do_optimizer_sanity_check(object())[0] == checked
    for served in (
        {"stage": 3},
        {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        {"stage": 3, "offload_optimizer": {"device": "none", "ratio": 0.5}},
    ):
        assert engine_of(stand_ins, **served)._do_optimizer_sanity_check(Ours())[0] == checked


def test_early_refusal_of_objects_under_offload_names_the_setting_for_ours_only(stand_ins):
    seams.install_early(None)
    seams.fit(Ours)
    on_cpu = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    with pytest.raises(ValueError, match='"zero_force_ds_cpu_optimizer": false'):
        engine_of(stand_ins, **on_cpu)._configure_optimizer(Ours(), [])
    for engine, client in (
        (engine_of(stand_ins, **on_cpu), object()),
        (engine_of(stand_ins, **on_cpu), None),
        (engine_of(stand_ins, force=False, **on_cpu), Ours()),
        (engine_of(stand_ins, stage=2), Ours()),
    ):
        configured, arguments, _ = engine._configure_optimizer(client, [])
        assert configured == "_configure_optimizer of DeepSpeed"
        assert arguments == (engine, client, [])


def test_first_engine_after_an_optimizer_fits_zero8_in(stand_ins):
    """The optimizer was made before DeepSpeed was imported."""
    seams.install_early(None)
    engine_of(stand_ins, stage=2)._configure_optimizer(None, [])
    assert utils.ZERO_SUPPORTED_OPTIMIZERS == [torch.optim.Adam]
    seams.classes.append(Ours)
    engine_of(stand_ins, stage=2)._configure_optimizer(None, [])
    assert utils.ZERO_SUPPORTED_OPTIMIZERS == [torch.optim.Adam, Ours]


def test_installed_loads_look_at_the_checkpoint_for_ours(stand_ins):
    seams.fit(Ours)
    ours = Ours()
    ours.param_groups = []
    load = "load_hp_checkpoint_state_from_checkpoint_dir"
    flat = made(stand_ins["DeepSpeedZeroOptimizer"], optimizer=ours)
    zero3 = made(stand_ins["DeepSpeedZeroOptimizer_Stage3"], optimizer=ours)
    for call in (partial(getattr(flat, load), "groups"), getattr(zero3, f"{load}_stage3")):
        with pytest.raises(FileNotFoundError):
            call("none")


@pytest.mark.parametrize("round_robin", [True, False])
def test_places_are_looked_for_by_offsets_in_round_robin_only(round_robin):
    """DeepSpeed looks at the offsets where there is padding: it is told that there is some."""
    zero = SimpleNamespace(
        round_robin_gradients=round_robin, round_robin_bit16_padding=[[0], [0]], cpu_offload=False
    )
    seen = []
    gradients.link(lambda zero: seen.append(zero.round_robin_bit16_padding), zero)
    assert seen == [[[1], [1]] if round_robin else [[0], [0]]]
    assert zero.round_robin_bit16_padding == [[0], [0]]


def test_master_weights_drop_the_bf16_validator_and_refuse_fp16():
    options = {"bf16_offload_validator": "b", "fp16_offload_validator": "f"}
    zero = SimpleNamespace(optimizer=Ours())
    asked = constructing.configure_masters(lambda zero, **kwargs: kwargs, zero, **options)
    assert asked == {"bf16_offload_validator": None, "fp16_offload_validator": "f"}
    with pytest.raises(ValueError, match="float16 weights cannot hold its updates"):
        constructing.configure_masters(None, zero, fp16_master_weights_and_gradients=True)


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("PartitionedOptimizerSwapper", "PartitionedSwapper"),
        ("PipelinedOptimizerSwapper", "PipelinedSwapper"),
    ],
)
def test_installed_swappers_are_ours_for_ours_only(stand_ins, monkeypatch, name, ours):
    monkeypatch.setattr(swapper, ours, lambda **kwargs: ("ours", kwargs))
    seams.fit(Ours)
    optimizer, other = Ours(), object()
    make = getattr(stage3, name)
    assert make(optimizer=optimizer, timers=1) == ("ours", {"optimizer": optimizer, "timers": 1})
    assert make(optimizer=other, timers=1)[0] == f"{name} of DeepSpeed"


def test_installed_engine_refuses_unknown_settings_of_checkpoints_for_ours_only(stand_ins):
    seams.fit(Ours)
    engine = engine_of(stand_ins)
    engine._config._param_dict["zero8"] = {"keep": 3}
    with pytest.raises(ValueError, match="unknown key 'keep'; valid are .*keep_checkpoints"):
        engine._do_optimizer_sanity_check(Ours())
    assert "of DeepSpeed" in engine._do_optimizer_sanity_check(object())[0]


def renamed(self, optimizer):
    """A method whose parameters have other names than zero8 knows."""


MISSING = {
    "ZERO_SUPPORTED_OPTIMIZERS gone": (utils, "ZERO_SUPPORTED_OPTIMIZERS", None),
    "ZERO_SUPPORTED_OPTIMIZERS no list": (utils, "ZERO_SUPPORTED_OPTIMIZERS", (torch.optim.Adam,)),
    "DeepSpeedEngine gone": (engine_module, "DeepSpeedEngine", None),
    "_do_optimizer_sanity_check gone": ("DeepSpeedEngine", "_do_optimizer_sanity_check", None),
    "_do_optimizer_sanity_check differs": (
        "DeepSpeedEngine",
        "_do_optimizer_sanity_check",
        renamed,
    ),
    "_configure_optimizer gone": ("DeepSpeedEngine", "_configure_optimizer", None),
    "offload_states of ZeRO 2 gone": ("DeepSpeedZeroOptimizer", "offload_states", None),
    "offload of states gone": (stage_1_and_2, "offload_optimizer_states", None),
    "offload of states differs": (stage_1_and_2, "offload_optimizer_states", renamed),
    "views gone": ("BF16_Optimizer", "_lazy_init_hp_params_optimizer_state", None),
    "no _post_step": ("DeepSpeedZeroOptimizer_Stage3", "_post_step", None),
    "ZeROOptimizer gone": (zero_base, "ZeROOptimizer", None),
    "_configure_master_weights differs": ("ZeROOptimizer", "_configure_master_weights", renamed),
    "_load_checkpoint differs": ("DeepSpeedEngine", "_load_checkpoint", renamed),
    "save_checkpoint gone": ("DeepSpeedEngine", "save_checkpoint", None),
    "load_checkpoint differs": ("DeepSpeedEngine", "load_checkpoint", renamed),
    "swapper gone": (stage3, "PartitionedOptimizerSwapper", None),
    "swapper's method gone": (PipelinedOptimizerSwapper, "_complete_swap_out", None),
    "as in DeepSpeed 0.19.7": (PipelinedOptimizerSwapper, "release_swap_buffers", None),
    "swapper's method differs": (OptimizerSwapper, "_get_state_tensors", renamed),
}


@pytest.mark.parametrize("name", MISSING)
def test_install_without_a_seam_is_one_clear_error_and_changes_nothing(
    stand_ins, monkeypatch, name
):
    owner, attribute, value = MISSING[name]
    owner = stand_ins[owner] if isinstance(owner, str) else owner
    if value is None and inspect.ismodule(owner):
        monkeypatch.delattr(owner, attribute)
    else:
        monkeypatch.setattr(owner, attribute, value)
    before, supported = seam_objects(), getattr(utils, "ZERO_SUPPORTED_OPTIMIZERS", ())
    supported_before = list(supported)
    with pytest.raises(RuntimeError) as caught:
        seams.fit(Ours)
    message = str(caught.value)
    assert message.startswith(f"zero8 does not fit this DeepSpeed ({deepspeed.__version__}): ")
    assert all(tested in message for tested in TESTED["deepspeed"])
    assert attribute in message
    assert seam_objects() == before
    assert list(supported) == supported_before


LOWEST, BEYOND = TESTED["deepspeed"]


@pytest.mark.parametrize(
    ("installed", "warned"),
    [("0.1", 1), (LOWEST, 0), (f"{LOWEST}+cpu", 0), (f"{LOWEST}.post1", 0), (BEYOND, 1), ("99", 1)],
)
def test_install_into_an_untested_version_warns_once(stand_ins, monkeypatch, installed, warned):
    monkeypatch.setattr(versions, "version", lambda name: installed)
    versions.warn_if_untested.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for optimizer_class in (Ours, Ours, type("Another", (), {})):
            seams.fit(optimizer_class)
    versions.warn_if_untested.cache_clear()
    assert len(caught) == warned
    for warning in caught:
        assert all(known in str(warning.message) for known in (installed, LOWEST, BEYOND))
