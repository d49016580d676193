# SPDX-License-Identifier: Apache-2.0
"""The moments of a ZeRO shard as DeepSpeed sees them: tensors that decode when they are read.

DeepSpeed expects `state[p]["exp_avg"]` and `["exp_avg_sq"]` to be float tensors as long as the
flat partition: it takes `narrow` views once and keeps them, reads them with `clone` or `copy_`,
writes them with `copy_`, moves and pickles them.  A MomentTensor is such a tensor without float
storage: a live view of a `MomentStore`, whose 8-bit codes the optimizer updates in place.

Reading decodes.  Writing encodes, to within half a code.  Other in-place operations, and views
other than contiguous ranges, raise: their writes would change a decoded copy and be lost.

A moment is pickled as a dict of plain values and tensors, so that reading a file of ZeRO needs no
code of ours.  A loaded state has that dict in the moment's place:

    HEADER      dict: format version, algorithm, codec, segment table (`moment_description`), and
                the 64-bit XXH3 of the bytes below, as `torch.load` compares no CRCs
    codes       uint8; `scales` and `float32`, float32: the buffers of `MomentStore`

`with_moments` makes moments of them again.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from zero8.files.manifest import hash_64
from zero8.spec.codec import codec_numbered
from zero8.spec.grid import MAX_DIMS
from zero8.spec.shown import shown
from zero8.state.header import FORMAT_VERSION, algorithm_of, check_version
from zero8.state.store import CHUNK_NUMEL, MomentStore
from zero8.state.table import Piece, PieceTable

aten = torch.ops.aten

HEADER = "zero8_moment"
"""The key of the header in a pickled moment, which marks it as one."""
BUFFERS = ("codes", "scales", "float32")
"""The keys of the buffers in a pickled moment, in the order of `MomentStore.buffers`."""
_OF_A_PIECE = ("name", "identity", "shape", "first", "start", "numel", "block_size")


class MomentTensor(torch.Tensor):
    """Elements `start .. start + numel - 1` of a moment: read as float32, stored as 8-bit codes.

    Attributes:
        store: the moment of the whole shard; views share it.
        start: index in the shard of the first element.
    """

    store: MomentStore
    start: int

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(
        cls,
        store: MomentStore,
        start: int = 0,
        numel: int | None = None,
        dtype: torch.dtype = torch.float32,
    ):
        """Make a view; `dtype` is the dtype that it reports and that reads return."""
        numel = store.table.numel if numel is None else numel
        self = torch.Tensor._make_wrapper_subclass(
            cls, (numel,), dtype=dtype, device=store.codes.device
        )
        self.store, self.start = store, start
        # Code that is given this without torch's dispatcher would read and write address 0.
        torch._C._set_throw_on_mutable_data_ptr(self)
        return self

    @property
    def is_whole(self) -> bool:
        """Whether this is the moment of the whole shard."""
        return self.start == 0 and self.numel() == self.store.table.numel

    @property
    def data(self) -> Tensor:
        """The moment itself, as any live view; values assigned to it are encoded."""
        return self.detach()

    @data.setter
    def data(self, values: Tensor) -> None:
        if values.shape != self.shape:
            raise ValueError(
                f"got data of shape {tuple(values.shape)} for an 8-bit moment of {self.numel()} "
                "elements"
            )
        self.copy_(values)

    def dense(self) -> Tensor:
        """Return the decoded elements as a plain tensor."""
        return self.store.read(self.start, self.numel()).to(self.dtype)

    def __repr__(self) -> str:
        """Describe it, without decoding it."""
        return (
            f"MomentTensor({self.store.name}, {self.numel()} elements from {self.start} of "
            f"{self.store.table.numel}, codec={self.store.codec.name})"
        )

    def __deepcopy__(self, memo: dict) -> Tensor:
        """Copy the codes; of a view, the decoded elements."""
        copy = MomentTensor(self.store.clone(), dtype=self.dtype) if self.is_whole else self.dense()
        return memo.setdefault(id(self), copy)

    def __reduce_ex__(self, protocol):
        """Pickle a dict of plain values and tensors; of a view, the decoded elements."""
        if not self.is_whole:
            return self.dense().__reduce_ex__(protocol)
        # torch.load with weights_only knows no other dict by name.
        return OrderedDict, (), None, None, iter(pickled(self).items())

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        """Run the operations of `_SERVED` on the codes; decode for others that only read."""
        kwargs = kwargs or {}
        if func in _SERVED and (result := _SERVED[func](*args, **kwargs)) is not NotImplemented:
            return result
        if func.is_view or _may_write(func, args, kwargs):
            raise NotImplementedError(
                f"{func} on an 8-bit moment: only contiguous ranges are views of it, and a write "
                "would change a decoded copy; use moment.clone() to read it, or "
                "moment.copy_(values) or moment[start:end].copy_(values) to write it"
            )
        tree = torch.utils._pytree.tree_map_only(MomentTensor, MomentTensor.dense, (args, kwargs))
        return func(*tree[0], **tree[1])


def moments_in(state: Mapping[str, Any]) -> dict[str, MomentTensor]:
    """Return the moments of a parameter's state by name; none of a state that is not ZeRO's."""
    return {name: x for name, x in state.items() if isinstance(x, MomentTensor)}


def pickled(moment: MomentTensor) -> dict[str, Any]:
    """Return the dict as which a whole moment is pickled; it has the live buffers."""
    buffers = moment.store.buffers
    header = {**moment_description(moment.store), "hash": _hash_of(buffers)}
    return {HEADER: header, **dict(zip(BUFFERS, buffers, strict=True))}


def _may_write(func, args: tuple, kwargs: dict) -> bool:
    """Return whether `func` may write to a moment; collectives do not mark what they write."""
    arguments = func._schema.arguments
    given = dict(zip((one.name for one in arguments), args, strict=False)) | kwargs
    marked = [one.name for one in arguments if one.alias_info and one.alias_info.is_write]
    written = list(given) if "c10d" in func.namespace else marked
    values = torch.utils._pytree.tree_leaves([given[name] for name in written if name in given])
    return any(isinstance(value, MomentTensor) for value in values)


def moment_description(store: MomentStore) -> dict:
    """Return plain data that makes a saved moment readable without a model."""
    return {
        "version": FORMAT_VERSION,
        "algorithm": store.rule.algorithm,
        "codec": store.codec.number,
        "which": store.name,
        "numel": store.table.numel,
        "written": store.written,
        "pieces": [{key: getattr(one, key) for key in _OF_A_PIECE} for one in store.table.pieces],
    }


def _hash_of(buffers: Iterable[Tensor]) -> int:
    """Return the 64-bit XXH3 of the bytes of tensors, in order; GPU tensors are read in chunks."""
    flat = (tensor.detach().resolve_neg().contiguous().view(-1) for tensor in buffers)
    return hash_64(chunk.cpu().numpy() for one in flat for chunk in one.split(CHUNK_NUMEL))


def has_moments(state: Mapping[str, Any]) -> bool:
    """Return whether a state is that of a partition: whether it has moments, pickled or not."""
    return any(isinstance(x, MomentTensor) or is_pickled_moment(x) for x in state.values())


def is_pickled_moment(value: object) -> bool:
    """Return whether a value of a loaded state is what a moment is pickled as."""
    return isinstance(value, dict) and HEADER in value


def with_moments(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a loaded state with the moments that have been pickled; raise as `moment_of`."""
    return {k: moment_of(v) if is_pickled_moment(v) else v for k, v in state.items()}


def moment_of(saved: Mapping[str, Any]) -> MomentTensor:
    """Return the moment pickled as this dict; raise ValueError if it is damaged or unknown."""
    like = store_like(saved[HEADER])
    buffers = [saved.get(key) for key in BUFFERS]
    got, expected = (
        [(getattr(t, "dtype", None), tuple(getattr(t, "shape", ()))) for t in of]
        for of in (buffers, like.buffers)
    )
    if got != expected:
        raise ValueError(
            f"8-bit moment: got {', '.join(BUFFERS)} of {got}, its segment table describes "
            f"{expected}; the file is damaged"
        )
    codes, scales, dense = buffers
    written = saved[HEADER].get("written") is True
    store = replace(like, codes=codes, scales=scales, dense=dense, written=written)
    store.check()
    hashes = _hash_of(store.buffers), saved[HEADER].get("hash")
    if hashes[0] != hashes[1]:
        pieces, names = store.table.pieces, "no parameter"
        if pieces:
            rest = f" and {len(pieces) - 1} more" if len(pieces) > 1 else ""
            names = shown(pieces[0].name) + rest
        raise ValueError(
            f"8-bit moment {store.name} of {names}: its bytes have the hash {hashes[0]}, those "
            f"that were saved {shown(hashes[1])}; the file is damaged"
        )
    return MomentTensor(store)


def store_like(description: dict) -> MomentStore:
    """Return a moment on the meta device from a `moment_description`; raise as `moment_of`."""
    if not isinstance(description, dict):
        raise ValueError(f"8-bit moment: got {shown(description)}, expected its description")
    check_version("8-bit moment", description.get("version"))
    algorithm = algorithm_of("8-bit moment", description.get("algorithm"))
    try:
        codec, rule = codec_numbered(description["codec"]), algorithm.moment(description["which"])
        table = PieceTable(tuple(_pieces(description["pieces"])), description["numel"])
        return MomentStore.zeros(codec, rule, table, device="meta")
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        message = str(error)[:200]
        raise ValueError(
            f"8-bit moment: its description is damaged: {type(error).__name__}: {message}"
        ) from error


def _pieces(described: Iterable[dict]) -> Iterator[Piece]:
    """Yield pieces from their descriptions, which must ascend without overlap."""
    end = 0
    for saved in described:
        shape = saved["shape"] if isinstance(saved, dict) else None
        if not isinstance(shape, list | tuple) or len(shape) > MAX_DIMS:
            raise ValueError(f"got a piece of shape {shown(shape)}")
        piece = Piece(**{**saved, "shape": tuple(shape)})
        if piece.start < end or not piece.numel:  # a crafted file may repeat one a million times
            raise ValueError(f"got a piece of {piece.numel} elements from {piece.start}")
        end = piece.start + piece.numel
        yield piece


# --- The operations ------------------------------------------------------------------------------


def _same(x: MomentTensor, *_) -> MomentTensor:
    return MomentTensor(x.store, x.start, x.numel(), x.dtype)


def _view(x: MomentTensor, shape) -> Tensor:
    return _same(x) if list(shape) in ([-1], [x.numel()]) else NotImplemented


def _slice(x: MomentTensor, dim=0, start=None, end=None, step=1) -> Tensor:
    begin, stop, _ = slice(start, end).indices(x.numel())
    numel = max(0, stop - begin)
    return MomentTensor(x.store, x.start + begin, numel, x.dtype) if step == 1 else NotImplemented


def _copy(x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if not isinstance(x, MomentTensor):
        return aten.copy_.default(x, source.dense(), non_blocking)
    if isinstance(source, MomentTensor) and x.is_whole and source.is_whole:
        ours, theirs = x.store, source.store
        if (ours.table, ours.codec) == (theirs.table, theirs.codec):
            for target, buffer in zip(ours.buffers, theirs.buffers, strict=True):
                target.copy_(buffer, non_blocking)
            ours.written |= theirs.written
            return x
    values = source.dense() if isinstance(source, MomentTensor) else source
    x.store.write(x.start, values.expand(x.shape).reshape(-1))
    return x


def _to_copy(x: MomentTensor, *, dtype=None, device=None, non_blocking=False, **_) -> Tensor:
    dtype = x.dtype if dtype is None else dtype
    device = x.device if device is None else torch.device(device)
    if not x.is_whole:
        return x.dense().to(device, dtype, non_blocking=non_blocking)
    return MomentTensor(x.store.to(device, non_blocking, copy=True), dtype=dtype)


_SERVED = {
    aten.detach.default: _same,
    aten.alias.default: _same,
    aten.view.default: _view,
    aten.slice.Tensor: _slice,
    aten.clone.default: lambda x, **_: x.dense(),
    aten.copy_.default: _copy,
    aten.zero_.default: lambda x: _copy(x, torch.zeros(1, device=x.device)),
    aten._to_copy.default: _to_copy,
}
