# SPDX-License-Identifier: Apache-2.0
"""The optimizer's parameters, settings and states: all but the step."""

import logging
import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from zero8.spec.buffers import check_entry
from zero8.spec.codec import DEFAULT_CODEC, Codec, codec_named
from zero8.state import settings
from zero8.state.memory_report import MemoryReport, MemoryRow
from zero8.state.param_info import ParamInfo
from zero8.state.plain import PlainState
from zero8.state.policy import Policy
from zero8.state.shard import MomentStore, Piece, PieceTable
from zero8.versions import warn_if_untested

logger = logging.getLogger("zero8")


class BlockwiseStates(torch.optim.Optimizer):
    """The settings and states of `zero8.optimizer.BlockwiseAdam`, on plain tensors."""

    fp32_optimizer_states = False  # what DeepSpeed asks of an optimizer for bf16 states

    def __init__(
        self,
        params: Iterable,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        adam_w_mode: bool = True,
        bias_correction: bool = True,
        maximize: bool = False,
        block_size: int = 256,
        codec: str = DEFAULT_CODEC,
        min_8bit_size: int = 4096,
        fp32_params: Iterable[str] = (),
        stochastic_rounding: bool | str = "auto",
        weight_correction_bits: int = 0,
        seed: int = 0,
        huge_pages: bool = False,
        **others,
    ):
        """Check the arguments and set up the groups; moments are made by the first step."""
        self._lock = threading.RLock()
        warn_if_untested("torch")
        adamw_mode = settings.check_other_keys(others)
        adam_w_mode = settings.check_flag("adam_w_mode", adam_w_mode)
        if adamw_mode is not None:
            adam_w_mode = settings.check_flag("adamw_mode", adamw_mode)
        self._settings = {
            "policy": Policy(block_size, min_8bit_size, fp32_params),
            "codec": codec_named(codec).name,
            "rounding": settings.check_rounding(stochastic_rounding),
            "correction_bits": settings.check_correction_bits(weight_correction_bits),
            "seed": settings.check_seed(seed),
            "huge_pages": settings.check_flag("huge_pages", huge_pages),
            "bias_correction": settings.check_flag("bias_correction", bias_correction),
        }
        self.nonfinite_blocks = 0
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": settings.check_flag("maximize", maximize),
            "decoupled_weight_decay": adam_w_mode,
            # torch AdamW's remaining keys, so that its checkpoints and ours load into each other.
            "amsgrad": False,
            "foreach": None,
            "capturable": False,
            "differentiable": False,
            "fused": None,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict) -> None:
        """Add a group of parameters, with its own lr, betas, eps and weight_decay if given."""
        if isinstance(param_group, dict):
            settings.check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)
        self._remember_params()
        try:
            # Patterns without names must fail here, not at the first step.
            for info in self._infos().values():
                self._settings["policy"].decide(info.name, info.shape)
        except ValueError:
            self.param_groups.pop()
            raise

    def _remember_params(self) -> None:
        """Note what a subclass needs of parameters that something may replace later."""

    def __setstate__(self, state: dict) -> None:
        """Restore what `__getstate__` kept; groups of other Adams get the keys they lack."""
        super().__setstate__(state)
        self.__dict__.setdefault("_lock", threading.RLock())
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)

    def __getstate__(self) -> dict:
        """Return what pickle and deepcopy keep, the settings included."""
        return {
            **super().__getstate__(),
            "_settings": self._settings,
            "nonfinite_blocks": self.nonfinite_blocks,
        }

    @property
    def codec(self) -> Codec:
        """The codec of new states."""
        return codec_named(self._settings["codec"])

    # --- The state of a parameter ---------------------------------------------------------------

    def _infos(self) -> dict[Tensor, ParamInfo]:
        """Return the name, place and shape of every parameter, in constructor order."""
        infos: dict[Tensor, ParamInfo] = {}
        for group in self.param_groups:
            names = group.get("param_names") or []
            # Others may have put flat or fewer tensors in the place of the named parameters.
            if len(names) != len(group["params"]):
                names = [None] * len(group["params"])
            for name, p in zip(names, group["params"], strict=True):
                infos[p] = ParamInfo(name, len(infos), tuple(p.shape))
        return infos

    def _piece(self, info: ParamInfo, start: int, numel: int, first: int) -> Piece:
        """Return a piece of a parameter, 8-bit or float32 as the policy decides."""
        decision = self._settings["policy"].decide(info.name, info.shape)
        block_size = decision.grid.block_size if decision.grid else 0
        return Piece(start, numel, first, info.shape, info.identity, block_size, info.label)

    def _is_corrected(self, p: Tensor) -> bool:
        return self._settings["correction_bits"] == 8 and p.dtype == torch.bfloat16

    def _correction_from(self, p: Tensor, saved: dict) -> dict:
        """Return the correction entry of a loaded state, as far as this optimizer keeps one."""
        correction = saved.get("param_correction")
        if correction is None:
            return {}
        if not self._is_corrected(p):
            logger.warning("weight_correction_bits is 0: the corrections of a checkpoint are lost")
            return {}
        check_entry("param_correction", correction, p.numel(), [torch.int8])
        if correction.shape != p.shape:
            raise ValueError(
                f"param_correction: got {tuple(correction.shape)}, expected {tuple(p.shape)}"
            )
        return {"param_correction": correction.to(p.device, copy=True).contiguous()}

    def _new_state(self, p: Tensor, infos: dict[Tensor, ParamInfo]) -> dict:
        """Return the state of a parameter that has taken no step."""
        piece = self._piece(infos[p], 0, p.numel(), 0)
        return PlainState.zeros(self.codec, piece, p.device).entries

    def _moments(self, p: Tensor, infos: dict[Tensor, ParamInfo]) -> tuple[PieceTable, list]:
        """Return the segment table and the two live moments of a parameter that has state."""
        label, shape = infos[p].label, infos[p].shape
        table, stores = PlainState(self.state[p]).stores(label)
        if table.numel == p.numel() and table.pieces[0].shape != shape:
            raise ValueError(
                f"state of {label}: got moments of shape {table.pieces[0].shape}, the parameter "
                f"has {shape}"
            )
        return table, stores

    def _adopted(self, p: Tensor, saved: dict, infos: dict[Tensor, ParamInfo]) -> dict:
        """Return a loaded state as this optimizer keeps it, in tensors of its own."""

        def target(identity: int | None) -> Piece:
            piece = self._piece(infos[p], 0, p.numel(), 0)
            return piece if identity is None else replace(piece, identity=identity)

        return PlainState.adopted(saved, self.codec, target, p.device).entries

    def load_state_dict(self, state_dict: dict) -> None:
        """Load a state dict of this optimizer, or of an fp32 Adam whose moments are then quantized.

        Raises:
            ValueError: if a state does not fit its parameter; nothing has been changed then.
        """
        with self._lock:
            self._load_state_dict(state_dict)

    def _load_state_dict(self, state_dict: dict) -> None:
        # torch casts every tensor to the parameter's dtype, which would destroy codes and scales;
        # what is no tensor and no container crosses it untouched, so states cross it wrapped.
        kept = {"state": self.state, "param_groups": self.param_groups}
        hooks = (
            self.register_load_state_dict_pre_hook(_wrap_states),
            self.register_load_state_dict_post_hook(_adopt_states, prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        except Exception:
            self.__dict__.update(kept)
            raise
        finally:
            for hook in hooks:
                hook.remove()

    def memory_report(self) -> MemoryReport:
        """Return, per parameter, whether its moments are 8-bit or float32, why, and their bytes."""
        rows, infos = [], self._infos()
        for p in (p for p, state in self.state.items() if state):
            corrected = "param_correction" in self.state[p]
            rows += self._memory_rows(*self._moments(p, infos), corrected)
        return MemoryReport(tuple(rows))

    def _memory_rows(
        self, table: PieceTable, stores: Iterable[MomentStore], corrected: bool
    ) -> list[MemoryRow]:
        rows = []
        for number, piece in enumerate(table.pieces):
            moments = [store.moment(number) for store in stores]
            tensors = [t for m in moments for t in (m.values, m.scales)]
            state_bytes = sum(t.nbytes for t in tensors if t is not None)
            rows.append(self._memory_row(piece, state_bytes, piece.numel * corrected))
        return rows

    def _memory_row(self, piece: Piece, state_bytes: int, correction_bytes: int) -> MemoryRow:
        reason = self._settings["policy"].decide(piece.name, piece.shape).reason
        bits = 8 if piece.is_quantized else 32
        sizes = (piece.numel, bits, reason, state_bytes, correction_bytes)
        return MemoryRow(piece.name, piece.shape, *sizes)


@dataclass
class _Wrapped:
    """A saved state on its way through torch's `load_state_dict`."""

    state: dict


def _wrap_states(optimizer: BlockwiseStates, state_dict: dict) -> dict:
    wrapped = {key: _Wrapped(state) for key, state in state_dict["state"].items()}
    return {**state_dict, "state": wrapped}


def _adopt_states(optimizer: BlockwiseStates) -> None:
    infos = optimizer._infos()
    for p, wrapped in optimizer.state.items():
        saved = wrapped.state
        if saved:
            adopted = optimizer._adopted(p, saved, infos)
            saved = {**adopted, **optimizer._correction_from(p, saved)}
        optimizer.state[p] = saved
