# SPDX-License-Identifier: Apache-2.0
"""Files that nobody's `save` writes: pickles put together opcode by opcode, in zips of our making.

Everything here is bytes; what a function returns stands for one object on the pickle's stack.
"""

import io
import pickle
import zipfile

MARK, STOP, TUPLE, REDUCE, PERSISTENT_ID = b"(", b".", b"t", b"R", b"Q"
BUILD, EMPTY_TUPLE, NEWOBJ, EMPTY_DICT, EMPTY_LIST = b"b", b")", b"\x81", b"}", b"]"


def value(x) -> bytes:
    """Return plain data: numbers, text, None, lists, dicts."""
    return pickle.dumps(x, 2)[2:-1]


def named(module: str, name: str) -> bytes:
    """Return a global."""
    return f"c{module}\n{name}\n".encode()


def tuple_of(*items: bytes) -> bytes:
    """Return a tuple."""
    return MARK + b"".join(items) + TUPLE


def list_of(*items: bytes) -> bytes:
    """Return a list."""
    return EMPTY_LIST + MARK + b"".join(items) + b"e"


def dict_of(items: dict) -> bytes:
    """Return a dict whose keys are plain data."""
    pairs = (value(key) + item for key, item in items.items())
    return EMPTY_DICT + MARK + b"".join(pairs) + b"u"


def call(module: str, name: str, *args: bytes) -> bytes:
    """Return what a global called with arguments returns."""
    return named(module, name) + tuple_of(*args) + REDUCE


def built(module: str, name: str, state: bytes) -> bytes:
    """Return an object of a class, its attributes given as a dict."""
    return named(module, name) + EMPTY_TUPLE + NEWOBJ + state + BUILD


def storage(kind: str, key: str, numel) -> bytes:
    """Return a storage of `numel` elements in the record `data/<key>`."""
    names = value("storage"), named("torch", kind), value(key), value("cpu"), value(numel)
    return tuple_of(*names) + PERSISTENT_ID


def tensor(where: bytes, size, stride, offset=0) -> bytes:
    """Return a tensor in a storage."""
    places = value(offset), value(tuple(size)), value(tuple(stride))
    hooks = call("collections", "OrderedDict")
    return call("torch._utils", "_rebuild_tensor_v2", where, *places, value(False), hooks)


def state_dict(entries: bytes) -> bytes:
    """Return the state dict of an optimizer of one parameter."""
    return dict_of({"state": dict_of({0: entries}), "param_groups": value([{"params": [0]}])})


def saved(content: bytes, records: dict[str, bytes] | None = None, **zipped) -> bytes:
    """Return a file of torch.save.

    Args:
        content: one object.
        records: what is in `data/<key>`.
        **zipped: how, as for `zipfile.ZipFile`.
    """
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", **zipped) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + content + STOP)
        archive.writestr("archive/byteorder", b"little")
        for key, data in (records or {}).items():
            archive.writestr(f"archive/data/{key}", data)
        archive.writestr("archive/version", b"3\n")
    return file.getvalue()
