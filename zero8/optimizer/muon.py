# SPDX-License-Identifier: Apache-2.0
"""`Muon8bitBlockwise`: Muon for matrices and AdamW for all else, in one optimizer."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from zero8.deepspeed.constructing import constructing_engine, global_shape
from zero8.optimizer.blockwise import BlockwiseOptimizer
from zero8.optimizer.in_backward import InBackward
from zero8.spec.adam import ADAM
from zero8.spec.algorithm import Algorithm
from zero8.spec.muon import MUON
from zero8.spec.options import check_lr, plain
from zero8.spec.shown import shown
from zero8.state import float32_modules

Matrix = TypeVar("Matrix")

ADAM_PARAMS = ("*embed*", "*lm_head*")
"""Names of matrices that AdamW steps by default, as in DeepSpeed."""


class Muon8bitBlockwise(BlockwiseOptimizer):
    r"""Muon whose momentum is kept as 8-bit codes, and 8-bit AdamW for all else.

    The step is that of `torch.optim.Muon` with the moment decoded before and encoded after it:
    `zero8.spec.muon` has the equations, `zero8.spec.codec` the codes and their error bounds.
    State: 1 + 4/block_size bytes per element of a matrix instead of 4; AdamW's parameters have the
    states of `Adam8bitBlockwise`.

    Each group is split into one with `use_muon` and one without.  Muon gets the parameters of two
    and more dimensions whose names match no pattern of `adam_params`, and that are not of a
    `zero8.StableEmbedding`.  A group that has `use_muon` stays as it is, and an attribute
    `use_muon` of a parameter decides before its name; both are DeepSpeed's.  A parameter of three
    dimensions holds a matrix per expert.  One of four and more, such as a filter, is one matrix,
    whose rows are its first dimension.

    If a matrix is cut between ranks, one of them gets the update in `ns_dtype`, orthogonalizes it
    and returns it; the momentum stays where it is.

    Args:
        params: see `Adam8bitBlockwise`; with names, unless groups or parameters have `use_muon`.
        lr: learning rate of Muon and AdamW, a number or a one-element tensor.
        muon_lr: learning rate of Muon's parameters instead of `lr`, unless their group has its own.
            DeepSpeed has this name, `adam_lr` and `ns_method`, which has no effect here.
        adam_lr: the same for AdamW's parameters.
        weight_decay: decoupled, for both.
        momentum: decay rate of Muon's moment.
        nesterov: Nesterov's momentum.
        ns_coefficients: a, b and c of equation (N1) of `zero8.spec.newton_schulz`.
        ns_steps: the number of its steps.
        ns_eps: the least norm that matrices are divided by; torch's Muon calls it eps.
        ns_dtype: the dtype of updates and of (N1): "bfloat16", "float32", or "auto" for bfloat16
            where the processor multiplies it fast.
        adjust_lr_fn: "match_rms_adamw", with which one lr suits both, or Keller Jordan's
            "original".
        betas: decay rates of AdamW's moments.
        eps: added to the root of AdamW's second moment.
        maximize: ascend instead of descend.
        adam_params: glob patterns of names of matrices that AdamW steps; without patterns, all
            parameters of two and more dimensions are Muon's, and names are not needed.
        **settings: those of `Adam8bitBlockwise` from `block_size` on, with the same defaults.

    Attributes:
        settings: the settings of the whole optimizer.
        adam_params: see the argument.
        own_lrs: `muon_lr` and `adam_lr`, where they were given.

    Raises:
        ValueError: for an unknown key or a bad value, or a parameter that it can never step.
    """

    algorithms = MUON, ADAM

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = MUON.options["lr"],
        weight_decay: float = MUON.options["weight_decay"],
        momentum: float = MUON.options["momentum"],
        nesterov: bool = MUON.options["nesterov"],
        ns_coefficients: Sequence[float] = MUON.options["ns_coefficients"],
        ns_steps: int = MUON.options["ns_steps"],
        *,
        ns_eps: float = MUON.options["ns_eps"],
        ns_dtype: str = MUON.options["ns_dtype"],
        adjust_lr_fn: str | None = MUON.options["adjust_lr_fn"],
        betas: tuple[float, float] = ADAM.options["betas"],
        eps: float = ADAM.options["eps"],
        maximize: bool = MUON.options["maximize"],
        adam_params: Iterable[str] = ADAM_PARAMS,
        muon_lr: float | Tensor | None = None,
        adam_lr: float | Tensor | None = None,
        **settings: Any,
    ):
        """Check the arguments and set up the groups; moments are made by the first step."""
        if isinstance(adam_params, str) or not all(isinstance(one, str) for one in adam_params):
            raise ValueError(
                f"adam_params: got {shown(adam_params)}, expected a list of glob patterns such as "
                f"{list(ADAM_PARAMS)}"
            )
        self.adam_params = tuple(adam_params)
        given = plain({"muon_lr": muon_lr, "adam_lr": adam_lr})
        self.own_lrs = {name: value for name, value in given.items() if value is not None}
        for name, value in self.own_lrs.items():
            check_lr(name, value)
        super().__init__(params, settings, ADAM.options | locals())

    def algorithm_of(self, group: Mapping[str, Any]) -> Algorithm:
        """See `BlockwiseOptimizer`."""
        return MUON if group["use_muon"] else ADAM

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, split into matrices of Muon and the others.

        Raises:
            ValueError: if parameters have neither names nor `use_muon`; or as
                `BlockwiseOptimizer.add_param_group`.
        """
        if not isinstance(param_group, dict) or "params" not in param_group:
            return super().add_param_group(param_group)
        before = len(self.param_groups)
        try:
            for group in self._split(param_group):
                super().add_param_group(group)
        except BaseException:
            del self.param_groups[before:]
            raise

    def state_dict(self) -> dict[str, Any]:
        """See `BlockwiseOptimizer.state_dict`; in fp32 with the names of `torch.optim.Muon`."""
        packed = super().state_dict()
        if self.state_dict_format == "fp32":
            packed["param_groups"] = [MUON.fp32_group(one) for one in packed["param_groups"]]
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this optimizer, or the moments of `torch.optim.Muon`.

        See `BlockwiseOptimizer.load_state_dict`.
        """
        groups = state_dict["param_groups"]
        if len(groups) == len(self.param_groups):
            ours = [group["use_muon"] for group in self.param_groups]
            named = [_as_ours(*pair) for pair in zip(groups, ours, strict=True)]
            state_dict = {**state_dict, "param_groups": named}
        super().load_state_dict(state_dict)

    def step_in_backward(self, model: torch.nn.Module) -> InBackward:
        """Raise ValueError: ranks that share a matrix exchange it, in the order of the groups."""
        raise ValueError("step_in_backward: got Muon8bitBlockwise, which steps after the backward")

    def __getstate__(self) -> dict[str, Any]:
        """See `BlockwiseOptimizer`."""
        own = {"adam_params": self.adam_params, "own_lrs": self.own_lrs}
        return {**super().__getstate__(), **own}

    def _split(self, group: dict[str, Any]) -> list[dict[str, Any]]:
        """Return a group of Muon's parameters and one of the others, if there are any."""
        given, names = group["params"], group.get("param_names")
        members = [given] if isinstance(given, Tensor) else list(given)
        if names:
            members = list(zip(names, members, strict=True))
        if "use_muon" in group:
            parts = {bool(group["use_muon"]): members}
        else:
            parts = {True: [], False: []}
            for member in members:
                parts[self._is_for_muon(*_param_and_name(member))].append(member)
        for member in parts.get(True, []):
            _check_matrix(_param_and_name(member)[0])
        if True in parts and constructing_engine()[0] is not None:
            parts[True] = largest_first(parts[True], lambda one: _param_and_name(one)[0].shape)
        rest = {key: value for key, value in group.items() if key != "param_names"}
        split = []
        for use_muon, those in parts.items():
            if not those:
                continue
            part = {**rest, "params": those, "use_muon": use_muon}
            if (name := "muon_lr" if use_muon else "adam_lr") in self.own_lrs:
                part.setdefault("lr", self.own_lrs[name])
            split.append(part)
        return split or [{**group, "use_muon": False}]

    def _is_for_muon(self, p: Tensor, name: str | None) -> bool:
        if getattr(p, "_fsdp_flattened", False):
            # Its matrices would look like vectors, and AdamW would step them.
            raise ValueError(
                "Muon8bitBlockwise: got parameters that FSDP1 has flattened; shard the model with "
                "FSDP2 (torch.distributed.fsdp.fully_shard)"
            )
        if (flag := getattr(p, "use_muon", None)) is not None:
            return bool(flag)
        if len(global_shape(p)) < 2 or p in float32_modules.params():
            return False
        if name is None and self.adam_params:
            raise ValueError(
                "Muon8bitBlockwise: got parameters without names, and embeddings look like "
                "matrices; pass model.named_parameters() instead of model.parameters(), or groups "
                "with use_muon"
            )
        return is_for_muon(str(name), global_shape(p), self.adam_params)


def is_for_muon(name: str, shape: Sequence[int], adam_params: Iterable[str]) -> bool:
    """Return whether Muon steps a parameter, unless a `use_muon` says it.

    `shape` is the whole one; `adam_params` are glob patterns of names of matrices that AdamW steps.
    """
    return len(shape) >= 2 and not any(fnmatchcase(name.lower(), one) for one in adam_params)


def largest_first(
    matrices: Iterable[Matrix], shape_of: Callable[[Matrix], Sequence[int]]
) -> list[Matrix]:
    """Return matrices in the order of DeepSpeed's Muon.

    ZeRO concatenates them in the order of the optimizer, and its checkpoints are read by position.
    """
    return sorted(matrices, key=lambda one: tuple(shape_of(one)), reverse=True)


def _param_and_name(member: Any) -> tuple[Tensor, str | None]:
    """Return a member of a group, and its name, or that of DeepSpeed's engine, if it has one."""
    name, p = member if isinstance(member, tuple) else (None, member)
    return p, name or constructing_engine()[1].get(p)


def _as_ours(group: dict[str, Any], use_muon: bool) -> dict[str, Any]:
    """Return a group of a state dict with our names; torch's Muon calls ns_eps eps."""
    if "use_muon" in group:
        return group
    given = {**group, "use_muon": use_muon}
    if use_muon and "ns_eps" not in group and "eps" in group:
        given["ns_eps"] = given.pop("eps")
    return given


def _check_matrix(p: Tensor) -> None:
    shape = global_shape(p)
    if len(shape) < 2:
        raise ValueError(
            f"use_muon: got a parameter of shape {shape}, expected 2 dimensions or more; put it "
            "into a group with use_muon false, whose parameters AdamW steps"
        )
