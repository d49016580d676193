# SPDX-License-Identifier: Apache-2.0
"""The optimizer for plain PyTorch: AdamW whose moments live as 8-bit codes and block scales."""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain

import torch
from torch import Tensor

from zero8 import dither, settings
from zero8.codec import DEFAULT_CODEC, Codec, codec_named
from zero8.op import kernel
from zero8.pieces import MomentStore, Piece, PieceTable
from zero8.policy import Policy
from zero8.report import MemoryReport, MemoryRow
from zero8.saved import PlainState
from zero8.scalars import UNKNOWN_HISTORY, StepScalars, next_history
from zero8.segment import Segment
from zero8.versions import warn_if_untested

logger = logging.getLogger("zero8")


@dataclass(frozen=True)
class ParamInfo:
    """What policy and dither know of a parameter: its name if it has one, its place, its shape."""

    name: str | None
    index: int
    shape: tuple[int, ...]

    @property
    def label(self) -> str:
        """The name, or the index in constructor order."""
        return str(self.index) if self.name is None else self.name

    @property
    def identity(self) -> int:
        """The 64-bit identity that the dither depends on."""
        return dither.identity_of(self.index if self.name is None else self.name)


@dataclass
class Work:
    """One tensor of a step: what to step over, and what to remember once it has been done."""

    param: Tensor
    grad: Tensor
    state: dict
    step: int
    history: float
    scalars: StepScalars
    table: PieceTable
    stores: tuple[MomentStore, MomentStore]

    def correction_of(self, piece: Piece) -> Tensor | None:
        """Return the live correction of one piece of a bfloat16 parameter, if it has one."""
        correction = self.state.get("param_correction")
        return None if correction is None else correction.view(-1)[piece.start :][: piece.numel]


@lru_cache(maxsize=65536)
def _stream_keys(seed: int, identity: int) -> tuple[int, int]:
    moment = dither.stream_key(seed, identity, "exp_avg_sq")
    return moment, dither.stream_key(seed, identity, "param")


class BlockwiseAdam(torch.optim.Optimizer):
    """AdamW with 8-bit block-wise moments on plain tensors; see `zero8.Adam8bitBlockwise`."""

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
        **others,
    ):
        """Check the arguments and set up the groups; moments are made by the first step."""
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

    # --- The step -------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure=None):
        """Take one optimizer step; see `zero8.reference` for the equations.

        Raises:
            ValueError: if a gradient is sparse, complex or of a dtype that is not served; nothing
                has been changed then.
            FloatingPointError: if a gradient is NaN or infinite.  The blocks that it touches, and
                only they, are left as they were; the step counts, and the state can be saved and
                stepped on.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for p in self._params_with_grad():
            check_tensors(p)
        # Compiles on first use: a failure must come before anything has been changed.
        kernel.module()
        infos = self._infos()
        work = [
            self._work(group, p, infos) for group in self.param_groups for p in self._ready(group)
        ]
        skipped = self._run(work)
        for item in work:
            item.state["step"], item.state["history"] = item.step, item.history
            for store in item.stores:
                store.written = False
        self._handle_nonfinite(skipped)
        return loss

    def _ready(self, group: dict) -> Iterator[Tensor]:
        return (p for p in group["params"] if p.grad is not None)

    def _params_with_grad(self) -> Iterator[Tensor]:
        return chain.from_iterable(self._ready(group) for group in self.param_groups)

    def _work(self, group: dict, p: Tensor, infos: dict[Tensor, ParamInfo]) -> Work:
        if not self.state.get(p):  # DeepSpeed looks at states early, which makes empty ones
            self.state[p] = self._new_state(p, infos)
        state = self.state[p]
        if self._is_corrected(p) and "param_correction" not in state:
            state["param_correction"] = torch.zeros(p.shape, dtype=torch.int8, device=p.device)
        table, stores = self._moments(p, infos)
        step = int(state["step"]) + 1
        beta1, beta2 = (float(beta) for beta in group["betas"])
        written = any(store.written for store in stores)
        history = UNKNOWN_HISTORY if written else float(state["history"])
        history = next_history(history, beta1, beta2)
        scalars = StepScalars.at(
            step,
            history,
            lr=float(group["lr"]),
            betas=(beta1, beta2),
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            decoupled=group["decoupled_weight_decay"],
            bias_correction=self._settings["bias_correction"],
            maximize=group["maximize"],
        )
        return Work(p, p.grad, state, step, history, scalars, table, stores)

    def _run(self, work: list[Work]) -> dict[str, int]:
        """Step over all tensors in one call; return the non-finite blocks by parameter label."""
        batch = [item for item in work if item.param.is_contiguous()]
        skipped = self._run_batch([(item, item.param) for item in batch])
        for item in work:
            if not item.param.is_contiguous():
                # The format is defined by the logical order of the elements: other layouts, such
                # as channels_last, step on a copy, one parameter at a time.
                copy = item.param.contiguous()
                skipped |= self._run_batch([(item, copy)])
                item.param.copy_(copy)
        return skipped

    def _run_batch(self, batch: list[tuple[Work, Tensor]]) -> dict[str, int]:
        segments, labels = [], []
        for item, param in batch:
            flat_param, flat_grad = param.view(-1), item.grad.contiguous().view(-1)
            for number, piece in enumerate(item.table.pieces):
                segments.append(self._segment(item, number, flat_param, flat_grad))
                labels.append(piece.name)
        counts = kernel.step(segments)
        return {label: count for label, count in zip(labels, counts, strict=True) if count}

    def _segment(self, item: Work, number: int, param: Tensor, grad: Tensor) -> Segment:
        piece = item.table.pieces[number]
        exp_avg, exp_avg_sq = item.stores
        moment_key, param_key = _stream_keys(self._settings["seed"], piece.identity)
        return Segment(
            param=param.narrow(0, piece.start, piece.numel),
            grad=grad.narrow(0, piece.start, piece.numel),
            exp_avg=exp_avg.moment(number),
            exp_avg_sq=exp_avg_sq.moment(number),
            codec=exp_avg.codec if piece.is_quantized else None,
            grid=piece.grid,
            first=piece.first,
            scalars=item.scalars,
            moment_phase=dither.phase_of(moment_key, item.step),
            param_phase=dither.phase_of(param_key, item.step),
            rounding=self._settings["rounding"],
            correction=item.correction_of(piece),
        )

    def _handle_nonfinite(self, skipped: dict[str, int]) -> None:
        if not skipped:
            return
        self.nonfinite_blocks += sum(skipped.values())
        worst = sorted(skipped.items(), key=lambda item: -item[1])[:10]
        raise FloatingPointError(
            f"non-finite gradient in {len(skipped)} parameter(s): "
            + ", ".join(f"{label} ({count} blocks)" for label, count in worst)
            + "; these blocks were left as they were, all others have stepped"
        )

    # --- State ----------------------------------------------------------------------------------

    def _infos(self) -> dict[Tensor, ParamInfo]:
        """Return the name, place and shape of every parameter, in constructor order."""
        infos: dict[Tensor, ParamInfo] = {}
        for group in self.param_groups:
            names = group.get("param_names") or [None] * len(group["params"])
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
        if correction.shape != p.shape or correction.dtype != torch.int8:
            raise ValueError(
                f"param_correction: got {tuple(correction.shape)} of {correction.dtype}, expected "
                f"{tuple(p.shape)} of torch.int8"
            )
        return {"param_correction": correction.to(p.device, copy=True).contiguous()}

    def _new_state(self, p: Tensor, infos: dict[Tensor, ParamInfo]) -> dict:
        """Return the state of a parameter that has taken no step."""
        piece = self._piece(infos[p], 0, p.numel(), 0)
        return PlainState.zeros(self.codec, piece, p.device).entries

    def _moments(self, p: Tensor, infos: dict[Tensor, ParamInfo]) -> tuple[PieceTable, list]:
        """Return the segment table and the two live moments of a parameter that has state."""
        return PlainState(self.state[p]).stores(infos[p].label)

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
            table, stores = self._moments(p, infos)
            for number, piece in enumerate(table.pieces):
                moments = [store.moment(number) for store in stores]
                tensors = [t for m in moments for t in (m.values, m.scales)]
                state_bytes = sum(t.nbytes for t in tensors if t is not None)
                correction_bytes = piece.numel if "param_correction" in self.state[p] else 0
                rows.append(self._memory_row(piece, state_bytes, correction_bytes))
        return MemoryReport(tuple(rows))

    def _memory_row(self, piece: Piece, state_bytes: int, correction_bytes: int) -> MemoryRow:
        reason = self._settings["policy"].decide(piece.name, piece.shape).reason
        bits = 8 if piece.is_quantized else 32
        sizes = (piece.numel, bits, reason, state_bytes, correction_bytes)
        return MemoryRow(piece.name, piece.shape, *sizes)


@dataclass
class _Wrapped:
    """A saved state on its way through torch's `load_state_dict`."""

    state: dict


def _wrap_states(optimizer: BlockwiseAdam, state_dict: dict) -> dict:
    wrapped = {key: _Wrapped(state) for key, state in state_dict["state"].items()}
    return {**state_dict, "state": wrapped}


def _adopt_states(optimizer: BlockwiseAdam) -> None:
    infos = optimizer._infos()
    for p, wrapped in optimizer.state.items():
        saved = wrapped.state
        if saved:
            adopted = optimizer._adopted(p, saved, infos)
            saved = {**adopted, **optimizer._correction_from(p, saved)}
        optimizer.state[p] = saved


def check_tensors(p: Tensor) -> None:
    """Raise ValueError if a parameter or its gradient is not served."""
    if p.grad.is_sparse:
        raise ValueError("got a sparse gradient; set sparse=False on the embedding")
    for kind, tensor in (("parameter", p), ("gradient", p.grad)):
        if tensor.dtype not in kernel.DTYPES:
            raise ValueError(
                f"got a {kind} of dtype {tensor.dtype}, expected one of {list(kernel.DTYPES)}"
            )
        if tensor.numel() and tensor.data_ptr() == 0:
            raise ValueError(
                f"got a {kind} of type {type(tensor).__name__} without storage of its own, "
                "expected a plain tensor; FSDP2 parameters are not supported yet"
            )
    if p.device.type != "cpu":
        raise ValueError(
            f"got a parameter on {p.device}; this version steps on the CPU: use DeepSpeed's "
            '"offload_optimizer": {"device": "cpu"}'
        )
