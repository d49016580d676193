# SPDX-License-Identifier: Apache-2.0
"""The optimizer for plain PyTorch: AdamW whose moments live as 8-bit codes and block scales."""

from collections.abc import Iterable
from dataclasses import fields
from functools import lru_cache
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from zero8.op import kernel
from zero8.spec import dither
from zero8.spec.buffers import check_apart, check_buffer
from zero8.spec.scalars import StepScalars, next_history
from zero8.spec.segment import Segment
from zero8.state.base import BlockwiseStates
from zero8.state.huge_pages import collapse
from zero8.state.param_info import ParamInfo
from zero8.state.shard import MomentStore
from zero8.step.cache import Batch, Contents, Moved, Prepared, packed, premises_of
from zero8.step.check import check_tensors
from zero8.step.cuda_graph import CapturedStep
from zero8.step.nonfinite import Ledger
from zero8.step.runners import Runner, is_capturing, runner_on

CAPTURE_TOO_EARLY = (
    "CUDA graph: a captured step needs states and a compiled kernel; call step() once before "
    "capturing it"
)

# Stand in segments until a step puts its own in, as phases of 0 do.
NO_SCALARS = StepScalars(**dict.fromkeys((field.name for field in fields(StepScalars)), 0.0))


@lru_cache(maxsize=65536)
def _stream_keys(seed: int, identity: int) -> tuple[int, int]:
    moment = dither.stream_key(seed, identity, "exp_avg_sq")
    return moment, dither.stream_key(seed, identity, "param")


class BlockwiseAdam(BlockwiseStates):
    """AdamW with 8-bit block-wise moments on plain tensors; see `zero8.Adam8bitBlockwise`."""

    def __init__(self, params: Iterable, *args, **kwargs):
        """As `BlockwiseStates`."""
        # What steps keep: of parameters by their id, and of the last step's parameters together.
        self._single: dict[int, Prepared] = {}
        self._joined: dict[torch.device, Prepared] = {}
        self._counts = Ledger()
        # Steps in the graph that was captured last, and in earlier ones whose counts are awaited.
        self._captured: list[CapturedStep] = []
        self._replaced: list[CapturedStep] = []
        super().__init__(params, *args, **kwargs)

    def __setstate__(self, state: dict) -> None:
        """Restore what `__getstate__` kept; what steps of this object have counted stays."""
        super().__setstate__(state)
        self._single, self._joined = {}, {}
        self.__dict__.setdefault("_counts", Ledger())
        self.__dict__.setdefault("_captured", [])
        self.__dict__.setdefault("_replaced", [])

    @torch._disable_dynamo  # as torch's own load_state_dict: addresses mean nothing to it
    @torch.no_grad()
    def step(self, closure=None):
        """Take one optimizer step; see `zero8.spec.reference` for the equations.

        Steps and loads of one optimizer in several threads wait for each other.
        After the first step the host does not wait for a GPU.  A step that is captured in a CUDA
        graph changes nothing yet; see `before_replay`.

        Raises:
            ValueError: if a gradient is sparse, complex or of a dtype that is not served, or a
                state does not fit its parameter; nothing has been changed then.
            FloatingPointError: if a gradient is NaN or infinite.  The blocks that it touches, and
                only they, are left as they were; the step counts, and the state can be saved and
                stepped on.  On a GPU it is raised by a later step, or by `check_finite`.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Python runs other threads while the kernel works.
        with self._lock:
            self._step()
        return loss

    def _step(self) -> None:
        # Compiles on first use: a failure must come before anything has been changed.
        kernel.module()
        batches = self._batches()
        todo = self._prepared(batches)
        if any(is_capturing(batch.device) for batch in batches):
            self._capture(batches, todo)
            return
        self._count_replays()
        for batch, (prepared, runner) in zip(batches, todo, strict=True):
            self._run(batch, prepared, runner)
        if skipped := self._counts.take():
            self._handle_nonfinite(skipped)

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
        contiguous, device = batch.tensors[0]["contiguous"].astype(bool), batch.devices
        if contiguous.all() and (device == device[:1]).all():
            return [batch] if params else []
        together = [np.flatnonzero(contiguous & (device == one)) for one in np.unique(device)]
        apart = [[place] for place in np.flatnonzero(~contiguous)]
        return [batch.at(places) for places in (*together, *apart) if len(places)]

    def _prepared(self, batches: list[Batch]) -> list[tuple[Prepared, Runner]]:
        """Return the records of batches, made anew where they do not fit, and who steps.

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
            if unfit and any(is_capturing(batch.device) for batch in batches):
                raise RuntimeError(CAPTURE_TOO_EARLY)
            runners = [runner_on(batch.device) for batch in batches]
            for single in unfit:
                self._single[id(single.params[0])] = self._prepare(single, infos)
        except Exception:  # whatever it is, states of no step must not stay
            for single in without_state:
                del self.state[single.params[0]]
            raise
        pairs = zip(batches, kept, strict=True)
        prepared = [prepared or self._join(batch) for batch, prepared in pairs]
        return list(zip(prepared, runners, strict=True))

    def _fitting(self, batch: Batch) -> Prepared | None:
        """Return what earlier steps have kept of a batch, if it still fits."""
        if len(batch.params) == 1:
            kept = self._single.get(id(batch.params[0]))
        else:
            kept = self._joined.get(batch.device)
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
        joined = Prepared.joined(self._premises(batch), parts)
        self._joined[batch.device] = joined
        return joined

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
            if not isinstance(value, Tensor) or value.layout != torch.strided:
                continue
            if not value.is_contiguous():
                state[key] = value.contiguous()
        table, stores = self._moments(p, infos)
        if table.numel != p.numel():
            raise ValueError(
                f"{infos[p].label}: got a parameter of {p.numel()} elements, its state has "
                f"{table.numel}; a parameter that changes its size needs a new optimizer"
            )
        correction = state.get("param_correction")
        if correction is not None:
            check_buffer("param_correction", correction, p.numel(), [torch.int8])
        written = {"the parameter": p} | _written(stores, state)
        check_apart({f"{name} of {infos[p].label}": t for name, t in written.items()})
        flat = p.contiguous().view(-1), p.grad.contiguous().view(-1)
        numbers = range(len(table.pieces))
        segments = [self._segment(number, stores, state, *flat) for number in numbers]
        labels = tuple(piece.name for piece in table.pieces)
        keys = [_stream_keys(self._settings["seed"], piece.identity) for piece in table.pieces]
        return Prepared.of(self._premises(single), labels, flat, segments, keys)

    def _segment(
        self, number: int, stores: list[MomentStore], state: dict, param: Tensor, grad: Tensor
    ) -> Segment:
        exp_avg, exp_avg_sq = stores
        piece = exp_avg.table.pieces[number]
        correction = state.get("param_correction")
        if correction is not None:
            correction = correction.view(-1).narrow(0, piece.start, piece.numel)
        return Segment(
            param=param.narrow(0, piece.start, piece.numel),
            grad=grad.narrow(0, piece.start, piece.numel),
            exp_avg=exp_avg.moment(number),
            exp_avg_sq=exp_avg_sq.moment(number),
            codec=exp_avg.codec if piece.is_quantized else None,
            grid=piece.grid,
            first=piece.first,
            scalars=NO_SCALARS,
            moment_phase=0,
            param_phase=0,
            rounding=self._settings["rounding"],
            correction=correction,
        )

    def _contents(self, states: list[dict]) -> Contents:
        """Return what says how to read each state, and the entries that hold them all."""
        entries = list(chain.from_iterable(map(dict.values, states)))
        if (formats := _formats(states)) is None:
            return None, entries
        # The keys say which entries are whose.
        return (list(map(tuple, states)), formats), entries

    def _note_writes(self, states: list[dict]) -> None:
        """Forget the bound on m^2/v where something other than a step has changed the moments."""

    def _run(self, batch: Batch, prepared: Prepared, runner: Runner) -> None:
        """Step over a batch, and note it in the states."""
        moved, which = self._moved(batch)
        contiguous = batch.contiguous()
        prepared.last = runner.run(*packed(prepared, contiguous, moved, which))
        self._counts.add(prepared.labels, prepared.last.counts())
        contiguous.copy_to(batch)
        _note_step(batch, moved, which)

    def _capture(self, batches: list[Batch], todo: list[tuple[Prepared, Runner]]) -> None:
        """Make a step a part of the CUDA graph that is being captured."""
        if not all(is_capturing(batch.device) for batch in batches):
            raise RuntimeError(
                "a step that is captured in a CUDA graph: got parameters that are not on the GPU, "
                "expected an optimizer of their own for them"
            )
        if any(prepared.last is None for prepared, _ in todo):
            raise RuntimeError(CAPTURE_TOO_EARLY)
        # While a graph is captured counts of an earlier one cannot be asked for.
        self._replaced += [captured for captured in self._captured if captured.is_refreshed]
        self._captured = [
            CapturedStep.of(batch, prepared, runner)
            for batch, (prepared, runner) in zip(batches, todo, strict=True)
        ]

    def before_replay(self) -> None:
        """Make the next replay of the CUDA graph with `step` in it take the next step.

        Counts the step, and gives the graph what depends on it: lr and the other settings of the
        groups, bias corrections, dither phases.  Call it before every replay, the first one too (it
        would read gradients that are gone), on the same stream.  The host waits only for an lr that
        is on a GPU.

            optimizer.step()  # once before: makes the states, compiles the kernel
            with torch.cuda.graph(graph):
                loss = loss_of(model(inputs))
                loss.backward()
                optimizer.step()
            for batch in batches:
                inputs.copy_(batch)
                optimizer.before_replay()
                graph.replay()

        One graph at a time: a new capture takes the place of the one before.

        Raises:
            RuntimeError: if no step has been captured, or parameters or states have moved since.
            FloatingPointError: as `step`, of an earlier replay; the next can follow nevertheless.
        """
        if not self._captured:
            raise RuntimeError("before_replay: got no captured step, expected one in a CUDA graph")
        batches = [self._as_it_is(captured.batch) for captured in self._captured]
        for captured, batch in zip(self._captured, batches, strict=True):
            if captured.has_moved(batch, self._premises(batch)):
                raise RuntimeError(
                    "before_replay: parameters or states are not where the CUDA graph has them "
                    "(was a checkpoint loaded since?); capture it again"
                )
        steps = [self._moved(batch) for batch in batches]
        pairs = zip(self._captured, steps, strict=True)
        launches = [captured.next_launch(*step) for captured, step in pairs]
        self._count_replays()
        for captured, launch in zip(self._captured, launches, strict=True):
            captured.refresh(launch)
        for batch, step in zip(batches, steps, strict=True):
            _note_step(batch, *step)
        if skipped := self._counts.take():
            self._handle_nonfinite(skipped)

    def _as_it_is(self, batch: Batch) -> Batch:
        """Return a batch of the same parameters, with their groups and states of today."""
        group_of = {p: group for group in self.param_groups for p in group["params"]}
        states = [self.state[p] for p in batch.params]
        return Batch([group_of[p] for p in batch.params], batch.params, batch.grads, states)

    def _count_replays(self) -> None:
        for captured in (*self._replaced, *self._captured):
            if counts := captured.take_counts():
                self._counts.add(captured.prepared.labels, counts)
        self._replaced = []

    def _handle_nonfinite(self, skipped: dict[str, int]) -> None:
        self.nonfinite_blocks += sum(skipped.values())
        worst = sorted(skipped.items(), key=lambda item: -item[1])[:10]
        raise FloatingPointError(
            f"non-finite gradient in {len(skipped)} parameter(s): "
            + ", ".join(f"{label} ({count} blocks)" for label, count in worst)
            + "; these blocks were left as they were, all others have stepped"
        )


def _formats(states: list[dict]) -> bytes | None:
    """Return what the states say about themselves; None if one says it in another form."""
    for attempt in range(2):
        try:
            return torch.cat([state["format"] for state in states]).numpy().tobytes()
        except (RuntimeError, TypeError):
            if attempt == 0:  # somebody has moved whole states to another device, perhaps
                _bring_to_host(states)
    return None


def _bring_to_host(states: list[dict]) -> None:
    for state in states:
        header = state["format"]
        if isinstance(header, Tensor) and not header.is_meta:
            state["format"] = header.cpu()


def _written(stores: list[MomentStore], state: dict) -> dict[str, Tensor]:
    """Return by name the tensors of a state that a step writes to."""
    found: dict[str, Tensor] = {}
    for store in stores:
        found |= store.named_buffers
    correction = state.get("param_correction")
    return found if correction is None else found | {"param_correction": correction}


def _note_step(batch: Batch, moved: list[Moved], which: list[int]) -> None:
    for state, number in zip(batch.states, which, strict=True):
        state["step"], state["history"], _ = moved[number]
