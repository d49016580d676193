# SPDX-License-Identifier: Apache-2.0
"""The optimizer for plain PyTorch: AdamW whose moments live as 8-bit codes and block scales."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import chain

import torch
from torch import Tensor

from zero8 import dither, settings
from zero8.codec import DEFAULT_CODEC, Codec, codec_named
from zero8.op import kernel
from zero8.op.tensors import object_lines, prefetch
from zero8.op.threads import step_threads
from zero8.pages import collapse
from zero8.params import ParamInfo, check_tensors
from zero8.pieces import MomentStore, Piece, PieceTable
from zero8.policy import Policy
from zero8.prepared import Batch, Contents, Moved, Prepared, premises_of, run
from zero8.report import MemoryReport, MemoryRow
from zero8.saved import PlainState
from zero8.scalars import StepScalars, next_history
from zero8.segment import Segment
from zero8.versions import warn_if_untested

logger = logging.getLogger("zero8")

# Stands in records of parameters until a step puts its own in.
NO_SCALARS = StepScalars(**dict.fromkeys((field.name for field in fields(StepScalars)), 0.0))


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
        huge_pages: bool = False,
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
            "huge_pages": settings.check_flag("huge_pages", huge_pages),
            "bias_correction": settings.check_flag("bias_correction", bias_correction),
        }
        self.nonfinite_blocks = 0
        # What steps keep: of parameters by their id, and of the last step's parameters together.
        self._single: dict[int, Prepared] = {}
        self._joined: Prepared | None = None
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
        self._single, self._joined = {}, None
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
            ValueError: if a gradient is sparse, complex or of a dtype that is not served, or a
                state does not fit its parameter; nothing has been changed then.
            FloatingPointError: if a gradient is NaN or infinite.  The blocks that it touches, and
                only they, are left as they were; the step counts, and the state can be saved and
                stepped on.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Compiles on first use: a failure must come before anything has been changed.
        isa = kernel.default_isa()
        if self._joined:
            prefetch(self._joined.lines)
        batches = self._batches()
        skipped: dict[str, int] = {}
        for batch, prepared in zip(batches, self._prepared(batches), strict=True):
            skipped |= self._run(batch, prepared, isa)
        if skipped:
            self._handle_nonfinite(skipped)
        return loss

    def _batches(self) -> list[Batch]:
        """Return the parameters that have gradients."""
        groups: list[dict] = []
        params: list[Tensor] = []
        for group in self.param_groups:
            params += (stepping := [p for p in group["params"] if p.grad is not None])
            groups += [group] * len(stepping)
        # Those that take their first step get an empty state here.
        batch = Batch(groups, params, [p.grad for p in params], [self.state[p] for p in params])
        # The format is defined by the logical order of the elements: other layouts, such as
        # channels_last, step on a copy, one parameter at a time.
        contiguous = batch.tensors[0]["contiguous"]
        if contiguous.all():
            return [batch] if params else []
        together = [place for place, is_so in enumerate(contiguous) if is_so]
        apart = [[place] for place, is_so in enumerate(contiguous) if not is_so]
        return [batch.at(places) for places in (together, *apart) if places]

    def _prepared(self, batches: list[Batch]) -> list[Prepared]:
        """Return the records of batches, and make those that do not fit anew.

        Raises:
            ValueError: if a parameter, a gradient or a state is not served; nothing has changed.
        """
        kept = [self._fitting(batch) for batch in batches]
        unfit = [
            single
            for batch, prepared in zip(batches, kept, strict=True)
            if prepared is None
            for single in batch.singles()
            if self._fitting(single) is None
        ]
        infos = self._infos() if unfit else {}
        without_state = [single for single in unfit if not single.states[0]]
        try:
            for single in unfit:
                check_tensors(*single.params)
            for single in unfit:
                self._single[id(single.params[0])] = self._prepare(single, infos)
        except Exception:  # whatever it is, states of no step must not stay
            for single in without_state:
                del self.state[single.params[0]]
            raise
        pairs = zip(batches, kept, strict=True)
        return [prepared or self._join(batch) for batch, prepared in pairs]

    def _fitting(self, batch: Batch) -> Prepared | None:
        """Return what earlier steps have kept of a batch, if it still fits."""
        single = len(batch.params) == 1
        kept = self._single.get(id(batch.params[0])) if single else self._joined
        if kept is None or kept.premises is None:
            return None
        return kept if kept.premises == self._premises(batch) else None

    def _premises(self, batch: Batch) -> tuple | None:
        """Return what the records of a batch depend on; None if a parameter has no state yet."""
        return premises_of(batch, self._contents(batch.states)) if all(batch.states) else None

    def _join(self, batch: Batch) -> Prepared:
        parts = [self._single[id(p)] for p in batch.params]
        if len(parts) == 1:
            return parts[0]
        self._joined = Prepared.joined(self._premises(batch), parts)
        return self._joined

    def _moved(self, batch: Batch) -> tuple[list[Moved], list[int]]:
        """Return where this step takes the moments, and which of these is each parameter's."""
        self._note_writes(batch.states)
        number: dict[tuple, int] = {}
        which = [
            number.setdefault((id(group), state["step"], state["history"]), len(number))
            for group, state in zip(batch.groups, batch.states, strict=True)
        ]
        groups = {id(group): group for group in self.param_groups}
        moved = [self._moved_from(groups[at], int(t), float(bound)) for at, t, bound in number]
        return moved, which

    def _moved_from(self, group: dict, step: int, history: float) -> Moved:
        betas = float(group["betas"][0]), float(group["betas"][1])
        step, history = step + 1, next_history(history, *betas)
        scalars = StepScalars.at(
            step,
            history,
            lr=float(group["lr"]),
            betas=betas,
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            decoupled=group["decoupled_weight_decay"],
            bias_correction=self._settings["bias_correction"],
            maximize=group["maximize"],
        )
        return Moved(step, history, scalars)

    def _prepare(self, single: Batch, infos: dict[Tensor, ParamInfo]) -> Prepared:
        (p,), (state,) = single.params, single.states
        if not state:
            state |= self._new_state(p, infos)
        if self._is_corrected(p) and "param_correction" not in state:
            state["param_correction"] = torch.zeros(p.shape, dtype=torch.int8, device=p.device)
        if self._settings["huge_pages"]:
            collapse(p.data)
            collapse(p.grad)
        for key, value in state.items():
            # The kernel works on the state itself, in the order that it has when it is contiguous.
            if isinstance(value, Tensor) and not value.is_contiguous():
                state[key] = value.contiguous()
        table, stores = self._moments(p, infos)
        if table.numel != p.numel():
            raise ValueError(
                f"{infos[p].label}: got a parameter of {p.numel()} elements, its state has "
                f"{table.numel}; a parameter that changes its size needs a new optimizer"
            )
        flat = p.contiguous().view(-1), p.grad.contiguous().view(-1)
        numbers = range(len(table.pieces))
        segments = [self._segment(number, stores, state, *flat) for number in numbers]
        tensors = [value for value in state.values() if isinstance(value, Tensor)]
        lines = object_lines([p, p.grad, state, *tensors])
        return Prepared.of(self._premises(single), lines, flat, segments)

    def _segment(
        self, number: int, stores: list[MomentStore], state: dict, param: Tensor, grad: Tensor
    ) -> Segment:
        exp_avg, exp_avg_sq = stores
        piece = exp_avg.table.pieces[number]
        correction = state.get("param_correction")
        if correction is not None:
            correction = correction.view(-1).narrow(0, piece.start, piece.numel)
        moment_key, param_key = _stream_keys(self._settings["seed"], piece.identity)
        return Segment(
            param=param.narrow(0, piece.start, piece.numel),
            grad=grad.narrow(0, piece.start, piece.numel),
            exp_avg=exp_avg.moment(number),
            exp_avg_sq=exp_avg_sq.moment(number),
            codec=exp_avg.codec if piece.is_quantized else None,
            grid=piece.grid,
            first=piece.first,
            scalars=NO_SCALARS,
            moment_phase=moment_key,
            param_phase=param_key,
            rounding=self._settings["rounding"],
            correction=correction,
        )

    def _contents(self, states: list[dict]) -> Contents:
        """Return what says how to read each state, and the entries that hold them all."""
        formats = torch.cat([state["format"] for state in states])
        entries = list(chain.from_iterable(map(dict.values, states)))
        # How many there are says which are whose.
        return (list(map(len, states)), formats.numpy().tobytes()), entries

    def _note_writes(self, states: list[dict]) -> None:
        """Forget the bound on m^2/v where something other than a step has changed the moments."""

    def _run(self, batch: Batch, prepared: Prepared, isa: str) -> dict[str, int]:
        """Step over a batch, note it in the states; return non-finite blocks by label."""
        moved, which = self._moved(batch)
        contiguous = batch.contiguous()
        nonfinite = run(prepared, contiguous, moved, which, step_threads(), isa)
        if contiguous is not batch:
            for p, stepped in zip(batch.params, contiguous.params, strict=True):
                if p is not stepped:
                    p.copy_(stepped)
        for state, number in zip(batch.states, which, strict=True):
            state["step"], state["history"], _ = moved[number]
        if not nonfinite.any():
            return {}
        infos = self._infos()
        tables = [self._moments(p, infos)[0] for p in batch.params]
        labels = [piece.name for table in tables for piece in table.pieces]
        return {label: int(n) for label, n in zip(labels, nonfinite, strict=True) if n}

    def _handle_nonfinite(self, skipped: dict[str, int]) -> None:
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
