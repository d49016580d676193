# SPDX-License-Identifier: Apache-2.0
"""How zero8 fits into DeepSpeed: what is changed, for whom, and what is refused."""

import inspect
import warnings
from functools import partial
from types import SimpleNamespace

import deepspeed
import pytest
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.runtime import base_optimizer as zero_base
from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime import engine as engine_module
from deepspeed.runtime.swap_tensor.optimizer_utils import OptimizerSwapper
from deepspeed.runtime.swap_tensor.pipelined_optimizer_swapper import PipelinedOptimizerSwapper
from deepspeed.runtime.zero import stage3, stage_1_and_2, utils
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as Kind
from nests import difference
from ranks import error_of, run_ranks
from zero_worker import Bag, base_optimizer, config, held, make_engine, take_step

import zero8
from zero8 import versions
from zero8.algorithms.adam import ADAM
from zero8.state.keywords import OWN_KEYS
from zero8.versions import TESTED
from zero8.zero import overrides, seams, swapper

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


class Engine:
    def __init__(self, force=True, **zero_options):
        self.module = torch.nn.Module()
        self.force = force
        zero_config = DeepSpeedZeroConfig(**zero_options)
        self._config = SimpleNamespace(zero_config=zero_config, _param_dict={})
        self.basic_optimizer = None

    def _do_optimizer_sanity_check(self, basic_optimizer):
        return "checked by DeepSpeed"

    def _configure_zero_optimizer(self, optimizer):
        return SimpleNamespace(optimizer_swapper=object())

    def _load_checkpoint(self, load_dir, tag, load_optimizer_states=True, load_module_only=False):
        return load_dir, tag, load_optimizer_states, load_module_only

    def save_checkpoint(self, save_dir, tag=None, client_state=None, save_latest=True):
        return save_dir, tag, client_state, save_latest

    def load_checkpoint(
        self, load_dir, tag=None, load_optimizer_states=True, load_module_only=False
    ):
        return load_dir, tag, load_optimizer_states, load_module_only

    def step(self, lr_kwargs=None):
        return "stepped by DeepSpeed"

    def _get_zero_param_shapes(self):
        return []

    def _get_ckpt_name(self, checkpoints_path, tag):
        return checkpoints_path, tag

    def _get_zero_ckpt_name(self, checkpoints_path, tag):
        return checkpoints_path, tag

    def _optimizer_has_ckpt_event_epilogue(self):
        return False

    def _configure_optimizer(self, client_optimizer, model_parameters):
        return "configured by DeepSpeed"

    def zero_use_cpu_optimizer(self):
        return self._config.zero_config.offload_optimizer is not None

    def zero_force_ds_cpu_optimizer(self):
        return self.force


class Swapper:
    """Stands for DeepSpeed's swappers."""

    def __init__(self, **kwargs):
        self.kwargs = kwargs


class Zero:
    def __init__(self, optimizer):
        self.optimizer = optimizer

    def _configure_master_weights(
        self,
        fp16_master_weights_and_gradients=False,
        bf16_offload_validator=None,
        fp16_offload_validator=None,
    ):
        flag = fp16_master_weights_and_gradients
        return flag, bf16_offload_validator, fp16_offload_validator


class Views:
    cpu_offload = False

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def unscale_and_clip_grads(self, grad_groups_flat, total_norm):
        return grad_groups_flat, total_norm

    def reset_cpu_buffers(self):
        return "reset"

    def async_accumulate_grad_in_cpu_via_gpu(self, param):
        return param

    def _optimizer_step(self, group_no):
        return group_no

    def _lazy_init_hp_params_optimizer_state(self):
        return "looked at"

    def load_state_dict(self, state_dict_list):
        return "loaded"

    def offload_states(self, include=None):
        return include

    def reload_states(self):
        return "reloaded"

    def load_hp_checkpoint_state_from_checkpoint_dir(self, lp_groups_name, checkpoint_dir):
        return lp_groups_name, checkpoint_dir

    def _link_all_hp_params(self):
        return self.round_robin_bit16_padding

    def initialize_optimizer_states(self):
        return "initialized"


def offload(optimizer, device, pin_memory=False, non_blocking=False):
    return "moved", device, pin_memory, non_blocking


class Zero3(Zero):
    def offload_states(self, include=None, device="cpu"):
        return include, device

    def step(self):
        return self._post_step()

    def _post_step(self):
        return "stepped"

    def unscale_and_clip_grads(self, sub_group_id, total_norm):
        return sub_group_id, total_norm

    def reset_cpu_buffers(self):
        return "reset"

    def _optimizer_step(self, sub_group_id):
        return sub_group_id

    def _reassign_or_swap_out_partitioned_parameters(self, sub_group_id):
        return sub_group_id

    def _create_fp32_partitions(self):
        return "created"

    def _setup_for_real_optimizer(self):
        return "set up"

    def partition_grads(self, params_to_release, grad_partitions):
        return grad_partitions

    def set_fp32_grad_for_param(self, value, param):
        return value, param

    def set_local_grad_for_param(self, value, param):
        return value, param

    def update_fp32_grad_for_param_vectorized(self, update_func, param_list):
        return update_func, param_list

    def get_fp32_grad_partitions(self):
        return {}

    def _rigid_state_dict(self):
        return {}

    def load_hp_checkpoint_state_from_checkpoint_dir_stage3(self, checkpoint_dir):
        return checkpoint_dir


@pytest.fixture
def stand_ins(monkeypatch):
    """Put fresh stand-ins where DeepSpeed's own are, and return them."""
    engine = type("Engine", (Engine,), dict(vars(Engine)))
    zero = type("Zero", (Zero,), dict(vars(Zero)))
    monkeypatch.setattr(engine_module, "DeepSpeedEngine", engine)
    monkeypatch.setattr(zero_base, "ZeROOptimizer", zero)
    monkeypatch.setattr(utils, "ZERO_SUPPORTED_OPTIMIZERS", [torch.optim.Adam])
    for name in overrides.SWAPPERS:
        monkeypatch.setattr(stage3, name, type(name, (Swapper,), {}))
    views = type("Views", (Views,), dict(vars(Views)))
    zero3 = type("Zero3", (Zero3,), dict(vars(Zero3)))
    monkeypatch.setattr(stage_1_and_2, "DeepSpeedZeroOptimizer", views)
    monkeypatch.setattr(stage_1_and_2, "offload_optimizer_states", offload)
    monkeypatch.setattr(bf16_optimizer, "BF16_Optimizer", type("BF16", (Views,), dict(vars(Views))))
    monkeypatch.setattr(stage3, "DeepSpeedZeroOptimizer_Stage3", zero3)
    return SimpleNamespace(engine=engine, zero=zero, views=views, zero3=zero3)


def seam_objects():
    """Return what is where zero8 changes DeepSpeed, but for the row that imports put in."""
    return [seam.found() for seam in seams.SEAMS if seam.change and seam.name != "ALL_OPS"]


def test_install_changes_the_seams_that_the_table_says_it_changes(stand_ins):
    # The import of DeepSpeed changes all of these but the last, which gets our class.
    apart = ("ALL_OPS", "PipelineModule.__init__", seams.SUPPORTED)
    table = [seam for seam in seams.SEAMS if seam.name not in apart]
    assert {seam.state for seam in table} == {"present"}
    seams.install(Ours, Ours)
    for seam in table:
        assert seam.state == ("installed" if seam.change else "present"), seam.name


def test_install_twice_equals_once(stand_ins):
    original = seam_objects()
    seams.install(Ours, Ours)
    once = seam_objects()
    seams.install(Ours, Ours)
    assert seam_objects() == once != original
    assert utils.ZERO_SUPPORTED_OPTIMIZERS == [torch.optim.Adam, Ours]


def test_install_for_classes_of_one_base_patches_once(stand_ins):
    """A subclass is an instance of both: patched for each, its saves would wait for themselves."""
    special = type("Special", (Ours,), {})
    seams.install(Ours, special)
    once = seam_objects()
    seams.install(Ours, Ours)
    assert seam_objects() == once
    assert utils.ZERO_SUPPORTED_OPTIMIZERS == [torch.optim.Adam, special, Ours]


def test_installed_mode_check_refuses_for_ours_only_and_still_asks_deepspeed(stand_ins):
    seams.install(Ours, Ours)
    refused = stand_ins.engine(stage=3, offload_optimizer={"device": "cpu", "ratio": 0.5})
    with pytest.raises(ValueError, match="ratio"):
        refused._do_optimizer_sanity_check(Ours())
    assert refused._do_optimizer_sanity_check(object()) == "checked by DeepSpeed"
    for served in (
        {"stage": 3},
        {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        {"stage": 3, "offload_optimizer": {"device": "none", "ratio": 0.5}},
    ):
        engine = stand_ins.engine(**served)
        assert engine._do_optimizer_sanity_check(Ours()) == "checked by DeepSpeed"


def test_installed_refusal_of_objects_under_offload_names_the_setting_for_ours_only(stand_ins):
    seams.install(Ours, Ours)
    on_cpu = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    with pytest.raises(ValueError, match='"zero_force_ds_cpu_optimizer": false'):
        stand_ins.engine(**on_cpu)._configure_optimizer(Ours(), [])
    for engine, client in (
        (stand_ins.engine(**on_cpu), object()),
        (stand_ins.engine(**on_cpu), None),
        (stand_ins.engine(force=False, **on_cpu), Ours()),
        (stand_ins.engine(stage=2), Ours()),
    ):
        assert engine._configure_optimizer(client, []) == "configured by DeepSpeed"


def test_installed_offload_states_of_zero3_refuses_ours_what_deepspeed_cannot_move(stand_ins):
    seams.install(Ours, Ours)
    ours, other = stand_ins.zero3(Ours()), stand_ins.zero3(object())
    for include in (None, [Kind.optim_states], [Kind.lp_params, Kind.hp_params]):
        with pytest.raises(ValueError, match="only FusedAdam's states.*use stage 1 or 2"):
            ours.offload_states(include)
        assert other.offload_states(include, "device") == (include, "device")
    movable = [Kind.lp_params, Kind.lp_grads]
    assert ours.offload_states(include=movable, device="x") == (movable, "x")


def test_installed_views_of_other_optimizers_are_left_alone(stand_ins):
    """The stand-in has no groups to look at: touching it would fail."""
    seams.install(Ours, Ours)
    other = stand_ins.views(object())
    assert other._lazy_init_hp_params_optimizer_state() == "looked at"
    assert other.load_state_dict([]) == "loaded"
    assert (other.offload_states("x"), other.reload_states()) == ("x", "reloaded")
    with pytest.raises(AttributeError, match="bit16_groups"):
        stand_ins.views(Ours()).load_state_dict([])


def test_installed_loads_of_universal_checkpoints_leave_other_optimizers_alone(stand_ins):
    """There is no such checkpoint: looking at it would fail."""
    seams.install(Ours, Ours)
    flat, zero3 = stand_ins.views(object()), stand_ins.zero3(object())
    assert flat.load_hp_checkpoint_state_from_checkpoint_dir("groups", "none") == ("groups", "none")
    assert zero3.load_hp_checkpoint_state_from_checkpoint_dir_stage3("none") == "none"
    ours = Ours()
    ours.param_groups = []
    for load in (
        partial(stand_ins.views(ours).load_hp_checkpoint_state_from_checkpoint_dir, "groups"),
        stand_ins.zero3(ours).load_hp_checkpoint_state_from_checkpoint_dir_stage3,
    ):
        with pytest.raises(FileNotFoundError):
            load("none")


@pytest.mark.parametrize("round_robin", [True, False])
def test_installed_places_are_looked_for_by_offsets_in_our_round_robin_only(stand_ins, round_robin):
    """DeepSpeed looks at the offsets where there is padding: ours is told that there is some."""
    seams.install(Ours, Ours)
    for optimizer, seen in ((Ours(), [[1], [1]] if round_robin else [[0], [0]]), (1, [[0], [0]])):
        zero = stand_ins.views(optimizer)
        zero.round_robin_gradients = round_robin
        zero.round_robin_bit16_padding = [[0], [0]]
        assert zero._link_all_hp_params() == seen
        assert zero.round_robin_bit16_padding == [[0], [0]]


def test_installed_master_weights_drop_the_bf16_validator_for_ours_only(stand_ins):
    seams.install(Ours, Ours)
    options = {"bf16_offload_validator": "b", "fp16_offload_validator": "f"}
    ours, other = stand_ins.zero(Ours()), stand_ins.zero(object())
    assert ours._configure_master_weights(**options) == (False, None, "f")
    assert other._configure_master_weights(**options) == (False, "b", "f")


def test_installed_master_weights_refuse_fp16_for_ours_only(stand_ins):
    seams.install(Ours, Ours)
    fp16 = {"fp16_master_weights_and_gradients": True}
    with pytest.raises(ValueError, match="float16 weights cannot hold its updates"):
        stand_ins.zero(Ours())._configure_master_weights(**fp16)
    assert stand_ins.zero(object())._configure_master_weights(**fp16) == (True, None, None)


@pytest.mark.parametrize("name", overrides.SWAPPERS)
def test_installed_swappers_are_ours_for_ours_only(stand_ins, monkeypatch, name):
    theirs, ours = getattr(stage3, name), type("Ours", (Swapper,), {})
    monkeypatch.setattr(swapper, overrides.SWAPPERS[name], ours)
    seams.install(Ours, Ours)
    optimizers = Ours(), object()
    made = [getattr(stage3, name)(optimizer=optimizer, timers=1) for optimizer in optimizers]
    assert [type(swapper) for swapper in made] == [ours, theirs]
    assert [swapper.kwargs["optimizer"] for swapper in made] == list(optimizers)


def test_installed_zero_and_load_leave_engines_of_others_as_they_are(stand_ins):
    seams.install(Ours, Ours)
    engine = stand_ins.engine()
    engine.optimizer = engine._configure_zero_optimizer(optimizer=None)
    loaded = engine._load_checkpoint("folder", "tag", False, load_module_only=True)
    assert loaded == ("folder", "tag", False, True)
    assert engine.save_checkpoint("folder", save_latest=False) == ("folder", None, None, False)
    assert engine.load_checkpoint("folder", "tag", False) == ("folder", "tag", False, False)


def test_installed_engine_refuses_unknown_settings_of_checkpoints_for_ours_only(stand_ins):
    seams.install(Ours, Ours)
    engine = stand_ins.engine()
    engine._config._param_dict["zero8"] = {"keep": 3}
    with pytest.raises(ValueError, match="unknown key 'keep'; valid are .*keep_checkpoints"):
        engine._do_optimizer_sanity_check(Ours())
    assert engine._do_optimizer_sanity_check(object()) == "checked by DeepSpeed"


def renamed(self, optimizer):
    """A method whose parameters have other names than zero8 knows."""


MISSING = {
    "ZERO_SUPPORTED_OPTIMIZERS gone": (utils, "ZERO_SUPPORTED_OPTIMIZERS", None),
    "ZERO_SUPPORTED_OPTIMIZERS no list": (utils, "ZERO_SUPPORTED_OPTIMIZERS", (torch.optim.Adam,)),
    "DeepSpeedEngine gone": (engine_module, "DeepSpeedEngine", None),
    "_do_optimizer_sanity_check gone": ("engine", "_do_optimizer_sanity_check", None),
    "_do_optimizer_sanity_check differs": ("engine", "_do_optimizer_sanity_check", renamed),
    "_configure_optimizer gone": ("engine", "_configure_optimizer", None),
    "offload_states of ZeRO 2 gone": ("views", "offload_states", None),
    "reload_states of ZeRO 2 gone": ("views", "reload_states", None),
    "offload of states gone": (stage_1_and_2, "offload_optimizer_states", None),
    "offload of states differs": (stage_1_and_2, "offload_optimizer_states", renamed),
    "views gone": ("views", "_lazy_init_hp_params_optimizer_state", None),
    "offload_states differs": ("zero3", "offload_states", renamed),
    "no _post_step": ("zero3", "_post_step", None),
    "ZeROOptimizer gone": (zero_base, "ZeROOptimizer", None),
    "_configure_master_weights gone": ("zero", "_configure_master_weights", None),
    "_configure_master_weights differs": ("zero", "_configure_master_weights", renamed),
    "_configure_zero_optimizer gone": ("engine", "_configure_zero_optimizer", None),
    "_load_checkpoint gone": ("engine", "_load_checkpoint", None),
    "_load_checkpoint differs": ("engine", "_load_checkpoint", renamed),
    "save_checkpoint gone": ("engine", "save_checkpoint", None),
    "load_checkpoint differs": ("engine", "load_checkpoint", renamed),
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
    owner = getattr(stand_ins, owner) if isinstance(owner, str) else owner
    if value is None and inspect.ismodule(owner):
        monkeypatch.delattr(owner, attribute)
    else:
        monkeypatch.setattr(owner, attribute, value)
    before, supported = seam_objects(), getattr(utils, "ZERO_SUPPORTED_OPTIMIZERS", ())
    supported_before = list(supported)
    with pytest.raises(RuntimeError) as caught:
        seams.install(Ours, Ours)
    message = str(caught.value)
    assert message.startswith(f"zero8 does not fit this DeepSpeed ({deepspeed.__version__}): ")
    assert all(tested in message for tested in TESTED["deepspeed"])
    sought = {"DeepSpeedEngine": "_do_optimizer", "ZeROOptimizer": "_configure_master"}
    assert sought.get(attribute, attribute) in message
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
        seams.install(Ours, Ours)
        seams.install(Ours, Ours)
        another = type("Another", (), {})
        seams.install(another, another)
    versions.warn_if_untested.cache_clear()
    assert len(caught) == warned
    for warning in caught:
        assert all(known in str(warning.message) for known in (installed, LOWEST, BEYOND))
