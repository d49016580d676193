# SPDX-License-Identifier: Apache-2.0
"""The optimizer that users name: plain tensors, and flat partitions of DeepSpeed's ZeRO."""

import logging
import sys
import warnings
import weakref
from dataclasses import replace

import torch
from torch import Tensor

from zero8.op import kernel
from zero8.optimizer import BlockwiseAdam
from zero8.spec.codec import Codec
from zero8.spec.scalars import UNKNOWN_HISTORY
from zero8.state.memory_report import MemoryReport
from zero8.state.param_info import ParamInfo
from zero8.state.plain import MOMENTS, check_dense, checked_history, checked_step
from zero8.state.shard import MomentStore, Piece, PieceTable
from zero8.step.cache import Contents
from zero8.step.runners import DEVICES
from zero8.zero import accelerate, seams
from zero8.zero.moment_tensor import MomentTensor
from zero8.zero.partition import table_of
from zero8.zero.swap_file import Layout
from zero8.zero.when_imported import when_imported

logger = logging.getLogger("zero8")


class Adam8bitBlockwise(BlockwiseAdam):
    r"""AdamW whose two moments are kept as 8-bit codes with one float32 scale per block.

    The step is AdamW's (Loshchilov and Hutter, arXiv:1711.05101) with the moments decoded before
    and encoded after it, block by block (Dettmers et al., arXiv:2110.02861); `zero8.spec.reference`
    has the equations, `zero8.spec.codec` the codes and their error bounds.  State: 2 +
    12/block_size bytes per element of an 8-bit parameter instead of 8.

    In a DeepSpeed config: `"optimizer": {"type": "Adam8bitBlockwise", "params": {...}}`.

    Args:
        params: parameters, groups, or `model.named_parameters()`; float32 or bfloat16, on the CPU
            or on CUDA GPUs.  Gradients are either, of float32 parameters float16 too.
        lr: learning rate, a number or a one-element tensor; for one that is on a GPU every step
            waits.
        betas: decay rates of the moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled (`adam_w_mode`) or added to the gradient.
        adam_w_mode: AdamW (default) or Adam with L2 regularisation.
        bias_correction: divide the moments by 1 - beta^t.
        maximize: ascend.
        block_size: elements per scale, a power of two in 64..4096.
        codec: "log" (default), "companded" or "dynamic"; see `zero8.spec.codec`.
        min_8bit_size: parameters with fewer elements keep float32 moments.
        fp32_params: glob patterns of parameter names that keep float32 moments.
        stochastic_rounding: of bfloat16 parameters: "auto" or "dither" (golden-ratio sequence),
            "hash" (independent), or False (nearest).
        weight_correction_bits: 8 keeps the 8 bits below those of each bfloat16 weight beside the
            states and rounds to the nearest of these 24-bit weights, without noise; 0 does not.
        seed: of the dither; no generator state exists.
        huge_pages: move parameters and gradients to huge pages before their first step (Linux 6.1;
            states are made there anyway): faster steps where memory is the limit.
        **others: keys of DeepSpeed's and torch's Adam that select an implementation have no
            effect; `amsgrad=True` and the like are refused.

    Raises:
        ValueError: for an unknown key or a bad value.
    """

    def __init__(self, params, *args, **kwargs):
        """See the class."""
        self._originals: dict[int, tuple[weakref.ref, ParamInfo]] = {}
        self.on_disk: dict[Tensor, Layout] = {}  # states that are swapped out
        super().__init__(params, *args, **kwargs)
        # DeepSpeed constructs us before ZeRO: the last moment to fit the two together.  One that is
        # given an object may be imported later.
        if "deepspeed" in sys.modules:
            seams.install(type(self))
        else:
            when_imported("deepspeed.runtime.engine", type(self)._fit_into_late_deepspeed)
        when_imported("accelerate.accelerator", type(self)._guard_from_accelerate)
        if any(p.device.type in DEVICES for group in self.param_groups for p in group["params"]):
            kernel.prepare()  # while an engine is made, where a wait is expected

    @classmethod
    def _fit_into_late_deepspeed(cls, _) -> None:
        try:
            seams.install(cls)
        except RuntimeError as error:  # `import deepspeed` must not fail; engines will say more
            warnings.warn(str(error), stacklevel=2)

    @classmethod
    def _guard_from_accelerate(cls, accelerator) -> None:
        accelerate.guard(accelerator, cls)

    def _remember_params(self) -> None:
        # DeepSpeed will replace them in the groups by flat partitions or float32 copies.
        names = _names_in_engine()
        for p, info in super()._infos().items():
            if id(p) not in self._originals:
                name = info.name or names.get(p)
                shape = tuple(getattr(p, "ds_shape", p.shape))
                self._originals[id(p)] = (weakref.ref(p), replace(info, name=name, shape=shape))

    def __getstate__(self) -> dict:
        """Return what pickle and deepcopy keep."""
        return {**super().__getstate__(), "_originals": {}, "on_disk": {}}

    def _infos(self) -> dict[Tensor, ParamInfo]:
        known = {id(p): info for p, info in self._known_params()}
        infos = super()._infos()
        copies = [p for p in infos if id(p) not in known]
        # Without ZeRO, DeepSpeed steps over float32 copies of what is trained, in the same order.
        replaced = [(p, info) for p, info in self._known_params() if p not in infos]
        trained = [info for p, info in replaced if p.requires_grad and p.numel()]
        if [tuple(p.shape) for p in copies] == [info.shape for info in trained]:
            known |= {id(p): info for p, info in zip(copies, trained, strict=True)}
        return {p: known.get(id(p), info) for p, info in infos.items()}

    def _is_original(self, p: Tensor) -> bool:
        """Return whether the optimizer was constructed with this parameter."""
        ref, _ = self._originals.get(id(p), (None, None))
        return ref is not None and ref() is p

    def _known_params(self) -> list[tuple[Tensor, ParamInfo]]:
        pairs = [(ref(), info) for ref, info in self._originals.values()]
        return [(p, info) for p, info in pairs if p is not None]

    # --- ZeRO partitions ------------------------------------------------------------------------

    def _table(self, p: Tensor, numel: int | None = None) -> PieceTable | None:
        """Return the segment table of a ZeRO partition, None for an ordinary parameter.

        Args:
            p: the parameter or partition.
            numel: the partition's number of elements if it is swapped out, and so has none.
        """
        if self._is_original(p):
            return None
        known = {id(q): info for q, info in self._known_params()}

        def make(q: Tensor, start: int, numel: int, first: int) -> Piece:
            return self._piece(known[id(q)], start, numel, first)

        numel = p.numel() if numel is None else numel
        return table_of(p, numel, [q for q, _ in self._known_params()], make)

    def _new_state(self, p: Tensor, infos: dict[Tensor, ParamInfo]) -> dict:
        table = self._table(p)
        if table is None:
            return super()._new_state(p, infos)
        stores = [MomentStore.zeros(self.codec, which, table, p.device) for which in MOMENTS]
        return _zero_state(stores, step=0, history=0.0)

    def _moments(self, p: Tensor, infos: dict[Tensor, ParamInfo]) -> tuple[PieceTable, list]:
        state, table = self.state[p], self._table(p)
        if self._is_original(p) or (table is None and "format" in state):
            return super()._moments(p, infos)
        if "format" in state:
            raise ValueError(
                "got the state of a whole parameter for a ZeRO partition of "
                f"{p.numel()} elements; was the checkpoint saved without ZeRO?"
            )
        _check_has_moments(state)
        quantized = [which for which in MOMENTS if isinstance(state[which], MomentTensor)]
        # A copied optimizer does not know its partitions, so that its own states have to say.
        like = None if table is None else (self.codec, table)
        for which in quantized:
            store = _store_of(which, state[which])
            _check_fits(p, which, store.table, table)
            like = store.codec, store.table
        # Universal checkpoints and fp32 Adam's arrive as dense float32 moments.
        dense = [which for which in MOMENTS if which not in quantized]
        absorbed = {which: self._absorbed(p, which, state[which], like) for which in dense}
        stores = [{**state, **absorbed}[which].store for which in MOMENTS]
        _check_alike(*stores)
        if dense:
            state |= absorbed | {"history": state.get("history", UNKNOWN_HISTORY)}
        return stores[0].table, stores

    def _contents(self, states: list[dict]) -> Contents:
        flat = [state for state in states if "format" not in state]
        if not flat:
            return super()._contents(states)
        whole = [state for state in states if "format" in state]
        description, tensors = super()._contents(whole) if whole else (None, [])
        descriptions = [description]
        for state in flat:
            described: list[object] = list(state)
            for value in state.values():
                if isinstance(value, MomentTensor):
                    store = value.store
                    described.append((store.table, store.codec.number))
                    tensors += [store.codes, store.scales, store.dense]
                elif isinstance(value, Tensor):
                    tensors.append(value)
            descriptions.append(described)
        return descriptions, tensors

    def _note_writes(self, states: list[dict]) -> None:
        for state in (state for state in states if "format" not in state):
            for which in MOMENTS:
                if state[which].store.written:
                    state["history"], state[which].store.written = UNKNOWN_HISTORY, False

    def _absorbed(
        self, p: Tensor, which: str, values: Tensor, like: tuple[Codec, PieceTable] | None
    ) -> MomentTensor:
        """Return a moment that arrived in float32, encoded by a codec over a segment table."""
        check_dense(f"{which} of a ZeRO partition", values)
        if like is None:
            raise ValueError(
                f"state of a parameter of {p.numel()} elements: got {which} without format, "
                "expected a state of Adam8bitBlockwise (load_state_dict reads those of an fp32 "
                "Adam too)"
            )
        if values.numel() != p.numel():
            raise ValueError(
                f"state of a ZeRO partition of {p.numel()} elements: got {which} of "
                f"{values.numel()}; was the checkpoint saved by another model or world size?"
            )
        codec, table = like
        store = MomentStore.zeros(codec, which, table, p.device)
        store.write(0, values.reshape(-1))
        return MomentTensor(store)

    def _adopted(self, p: Tensor, saved: dict, infos: dict[Tensor, ParamInfo]) -> dict:
        table = self._table(p)
        if table is None:
            return super()._adopted(p, saved, infos)
        _check_has_moments(saved, "step")
        quantized = [which for which in MOMENTS if isinstance(saved[which], MomentTensor)]
        step, history = checked_step(saved), UNKNOWN_HISTORY
        if len(quantized) == len(MOMENTS):
            _check_has_moments(saved, "history")
            history = checked_history(saved)
        stores = [
            self._fitted(which, saved[which], table).to(p.device)
            if which in quantized
            else self._absorbed(p, which, saved[which], (self.codec, table)).store
            for which in MOMENTS
        ]
        return _zero_state(stores, step, history)

    def _fitted(self, which: str, moment: MomentTensor, table: PieceTable) -> MomentStore:
        """Return a saved moment over this partition's table: verbatim where the two agree."""
        saved = _store_of(which, moment)
        check_places(saved.table, table)
        # The dither goes on where it was: identities come from the checkpoint.
        pairs = list(zip(table.pieces, saved.table.pieces, strict=True))
        pieces = tuple(replace(ours, identity=theirs.identity) for ours, theirs in pairs)
        wanted = PieceTable(pieces, table.numel)
        same_blocks = all(ours.block_size == theirs.block_size for ours, theirs in pairs)
        if same_blocks and saved.codec == self.codec:
            return replace(saved.clone(), table=wanted)
        store = MomentStore.zeros(self.codec, saved.which, wanted)
        store.write(0, saved.read(0, table.numel))
        return store

    def memory_report(self) -> MemoryReport:
        """Return the rows of all states, those on a disk included."""
        rows = list(super().memory_report().rows)
        for layout in self.on_disk.values():
            rows += self._memory_rows(layout.table, layout.like, layout.correction_numel > 0)
        return MemoryReport(tuple(rows))

    def _handle_nonfinite(self, skipped: dict[str, int]) -> None:
        # One rank must not raise while the others wait in a collective: count, log, go on.  Without
        # ZeRO all ranks have the same gradients, but counts may reach them at different steps.
        is_sharded = any("format" not in state for state in self.state.values())
        if is_sharded or (_num_ranks() > 1 and self._has_params_on_gpus()):
            self._note_nonfinite(skipped)
        else:
            super()._handle_nonfinite(skipped)

    def _has_params_on_gpus(self) -> bool:
        return any(p.is_cuda for group in self.param_groups for p in group["params"])

    def _note_nonfinite(self, skipped: dict[str, int]) -> None:
        self.nonfinite_blocks += sum(skipped.values())
        for label, count in skipped.items():
            logger.warning("non-finite gradient: %s: %d blocks left as they were", label, count)

    def check_finite(self, process_group=None) -> None:
        """Raise FloatingPointError on every rank if any rank has met a non-finite gradient.

        One all_reduce of 8 bytes; all ranks of the group must call it.  Waits until a GPU has
        finished the steps so far.
        """
        self._count_replays()
        self._note_nonfinite(self._counts.take(wait=True))
        count = torch.tensor([self.nonfinite_blocks], dtype=torch.int64, device="cpu")
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            count = count.to(_device_of(process_group))
            torch.distributed.all_reduce(count, group=process_group)
        if count.item():
            raise FloatingPointError(
                f"{count.item()} blocks met a non-finite gradient so far (all ranks); they were "
                "left as they were"
            )


def _num_ranks() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return 1


def _device_of(process_group) -> str:
    """Return the type of device whose tensors a group can reduce: of NCCL alone, "cuda"."""
    pairs = torch.distributed.get_backend_config(process_group).split(",")  # "cpu:gloo,cuda:nccl"
    devices = [pair.partition(":")[0] for pair in pairs]
    return "cpu" if "cpu" in devices else devices[0]


def _check_has_moments(state: dict, *others: str) -> None:
    if missing := [key for key in (*others, *MOMENTS) if key not in state]:
        raise ValueError(
            f"state of a ZeRO partition: got entries {sorted(state)}, without {missing}; was "
            "the checkpoint saved without ZeRO?"
        )


def _store_of(which: str, moment: MomentTensor) -> MomentStore:
    """Return the store of a moment that came from outside; raises ValueError if it is not whole."""
    if moment.store.which != which or not moment.is_whole:
        raise ValueError(f"{which} of a ZeRO partition: got {moment!r}, expected the whole {which}")
    moment.store.check()
    return moment.store


def _check_fits(p: Tensor, which: str, table: PieceTable, wanted: PieceTable | None) -> None:
    """Raise ValueError unless a moment's table is one for this partition, as far as is known."""
    if table.numel != p.numel():
        raise ValueError(
            f"{which} of a ZeRO partition: got a moment of {table.numel} elements, expected "
            f"{p.numel()}"
        )
    if wanted is not None:
        check_places(table, wanted)


def _check_alike(exp_avg: MomentStore, exp_avg_sq: MomentStore) -> None:
    """Raise ValueError unless one description of blocks and codes holds for both moments."""
    got, expected = ((store.codec.name, store.table.places) for store in (exp_avg_sq, exp_avg))
    if got != expected:
        raise ValueError(
            f"exp_avg_sq of a ZeRO partition: got codec {got[0]} over {got[1][:3]}..., expected "
            f"{expected[0]} over {expected[1][:3]}..., as exp_avg has"
        )


def check_places(saved: PieceTable, table: PieceTable) -> None:
    """Raise ValueError if a saved segment table has other ranges of parameters than this one."""
    places = [[(q.start, q.numel, q.first, q.shape) for q in t.pieces] for t in (saved, table)]
    if places[0] != places[1] or saved.numel != table.numel:
        raise ValueError(
            "the checkpoint's partition holds other ranges of parameters than this one: got "
            f"{places[0][:3]}..., expected {places[1][:3]}...; was it saved by another model, "
            "world size or ZeRO stage? Convert it to a universal checkpoint first"
        )


def _zero_state(stores: list[MomentStore], step: int, history: float) -> dict:
    exp_avg, exp_avg_sq = (MomentTensor(store) for store in stores)
    return {"step": step, "history": history, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}


def _names_in_engine() -> dict[Tensor, str]:
    """Return the names of parameters in the DeepSpeed engine that is constructing an optimizer.

    It is found among the callers.  DeepSpeed's map for debugging, which would be at hand, belongs
    to the process: an older engine empties it when it is collected, on this rank perhaps only.
    """
    engines = sys.modules.get("deepspeed.runtime.engine")
    frame = sys._getframe() if engines else None
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, engines.DeepSpeedEngine):
            return caller.param_names
        frame = frame.f_back
    return {}
