# SPDX-License-Identifier: Apache-2.0
"""Files made to harm whoever reads them: each gets an error that names it, at once, for nothing.

All are read in one process of its own, which says how each went; crashes and hangs are seen there.
"""

import json
import os
import sys

import pytest
from crafted_cases import (
    CASES,
    dcp_folder,
    floats,
    metadata,
    second_moment,
    with_codes,
    with_first_moment,
    with_moments,
)
from crafted_files import tensor, value
from places import FOLDERS
from processes import started

from zero8.algorithms.adam import UNKNOWN_HISTORY
from zero8.checkpoint.read.open import open_checkpoint

MAX_SECONDS, MAX_MIB = 2.0, 200

SAYS = {
    "got 0 state dicts of optimizers": (
        "plain: os.system",
        "plain: posix.system",
        "plain: eval",
        "plain: open",
        "plain: a module of this process",
        "plain: a class by NEWOBJ",
        "plain: getattr",
        "plain: bytearray",
        "plain: torch.Tensor",
        "plain: a dict in itself",
        "plain: laughs for all",
        "plain: a memo of 2^31",
        "plain: states in a list",
    ),
    "it sets attributes of an object that it has not made": (
        "plain: an attribute of a class",
        "plain: an attribute of a function",
        "plain: set_ by BUILD",
        "DCP: an attribute of a class of torch's",
    ),
    "it calls something that is not a class or function": ("plain: what is no function",),
    "damaged: got a copy of a dict": ("plain: copies of a dict",),
    "damaged: got a tensor that ends at 268435456 in a storage of 2": ("plain: a size beyond",),
    "damaged: got a tensor that ends at 1073741826 in a storage of": ("plain: a stride beyond",),
    "damaged: got a tensor that ends at 257 in a storage of 256": ("plain: an offset beyond",),
    "damaged: got a tensor with an impossible size, stride or offset": (
        "plain: a negative offset",
        "plain: a negative stride",
        "plain: a negative size",
        "plain: a size of a float",
    ),
    "damaged, or not readable": (
        "plain: sizes that are one number",
        "plain: what is not in the memo",
        "plain: bytes of 2^40",
        "plain: text of 2^40",
        "DCP: bytes of 2^40",
        "plain: a frame of 2^40",
        "plain: STOP at once",
        "plain: a bytearray of 2^40",
        "plain: a number in text",
        "plain: an extension",
        "ZeRO: a state of a tensor",
        "ZeRO: a state of laughs",
        "ZeRO: states of laughs",
    ),
    "damaged: got 1024 bytes of tensor 0, expected more": (
        "plain: a storage beyond",
        "plain: a storage of 2^60",
        "plain: a storage of -1",
    ),
    "state of 0: got entries ['exp_avg', 'exp_avg_sq', 'step']": (
        "plain: a storage that is not there",
        "plain: expanded",
        "plain: expanded, in rows",
        "plain: meta",
        "plain: quantized",
        "plain: sparse",
        "plain: complex",
        "plain: a subclass of Tensor",
        "plain: laughs for a moment",
        "plain: a moment of text",
    ),
    "damaged: got a tensor of impossible sizes": ("plain: empty, of huge sizes",),
    "damaged: got a tensor of 2000 dimensions": ("plain: 2000 dimensions",),
    "got a key of a dict that is neither text nor a number": (
        "plain: nested tuples as a key",
        "plain: a list as a key",
        "DCP: nested tuples as a key",
    ),
    "state of 0: got entries ['step']": ("plain: nested lists",),
    "state entry step: got a value of type list": (
        "plain: a list in itself",
        "plain: laughs for a step",
    ),
    "damaged: the checksum of data.pkl is wrong": (
        "plain: no STOP",
        "plain: a pickle that has changed",
    ),
    "state entry step: got an integer of 329993 bits": ("plain: a step of 10^5 digits",),
    "state entry step: got nan": ("plain: a step of NaN",),
    "state entry step: got -1": (
        "plain: a step of -1",
        "folder: swap: a step of -1",
    ),
    "state entry step: got '999999999999999999999999999999999999999": ("plain: a step of text",),
    "state entry step: got a value of type Tensor": ("plain: a step of a tensor",),
    "state entry step: got None": ("plain: no step",),
    "exp_avg_sq of 0: got 256 elements": ("plain: moments of other lengths",),
    "state entry format of 0: got 131072 numbers": ("plain: format of many sizes",),
    "state of 0: got a format that is not a row of int64": ("plain: format of floats",),
    "state of 0: got moments of shape (4, 256), the parameter has (": ("plain: codes of floats",),
    "param_correction: got 8 elements": ("plain: a correction of another length",),
    "state entry history: got a value of type list": ("plain: history of laughs",),
    "state entry history: got nan": (
        "plain: history of NaN",
        "folder: swap: a history of NaN",
    ),
    "got a state of 0 that is not a dict": ("plain: a state that is no dict",),
    "got a parameter group without params": (
        "plain: groups without params",
        "plain: groups of numbers",
    ),
    "got params that are neither numbers nor names": ("plain: names of lists",),
    "got 0 records data.pkl": ("plain: no data.pkl",),
    "damaged: got two entries of the zip with one name": ("plain: two data.pkl",),
    "got compressed entries, which torch.save does not write": ("plain: compressed",),
    "damaged: entry 'archive/version' of the zip is missing": ("plain: an entry beyond",),
    "damaged: entries of the zip overlap": ("plain: entries that overlap",),
    "got numbers that are not little-endian": ("plain: another byte order",),
    "not a file of torch.save": (
        "plain: a zip of nothing",
        "plain: one byte",
    ),
    "got an empty file": ("plain: empty", "DCP: empty"),
    "got a pipe, expected a file": ("DCP: a pipe for a file", "folder: a pipe of states"),
    "got a symbolic link, expected a file": (
        "folder: a link to a device",
        "folder: a link to nowhere",
    ),
    "not a file of torch.save, or damaged: File is not a zip file": (
        "plain: zeros",
        "plain: a bare pickle",
    ),
    "got format version a value of type list": ("ZeRO: a version of laughs",),
    "got format version 4": ("ZeRO: version 4",),
    "got a state of algorithm a value of type list": ("ZeRO: an algorithm of laughs",),
    "codec number a value of type list": ("ZeRO: a codec of laughs",),
    "got a value of type list": ("ZeRO: a moment of laughs",),
    "p: numel: got a value of type list": ("ZeRO: elements of laughs",),
    "got a piece called a value of type list": ("ZeRO: a name of laughs",),
    "block_size: got a value of type list": ("ZeRO: blocks of laughs",),
    "got a piece called a value of type tuple": ("ZeRO: a name of nested tuples",),
    "p: a size of shape: got a value of type list": ("ZeRO: a shape of laughs",),
    "got a piece of shape a value of type list": ("ZeRO: a shape of 10^5 sizes",),
    "p: start: got 0": ("ZeRO: 2^48 elements",),
    "got a piece of 0 elements from 0": ("ZeRO: an empty piece 10^6 times",),
    "got a piece of shape None": (
        "ZeRO: pieces of text",
        "ZeRO: pieces that are numbers",
    ),
    "those that were saved -1": ("ZeRO: a hash of -1",),
    "those that were saved 18446744073709551616": ("ZeRO: a hash of 2^64",),
    "those that were saved an integer of 332193 bits": ("ZeRO: a hash of 10^5 digits",),
    "those that were saved a value of type list": ("ZeRO: a hash of laughs",),
    "those that were saved 1": ("ZeRO: another hash",),
    "expected 8-bit moments ['exp_avg', 'exp_avg_sq']": ("ZeRO: one moment alone",),
    "its moments are of different elements": (
        "ZeRO: one moment twice",
        "ZeRO: moments of other elements",
        "ZeRO: moments of two codecs",
    ),
    "got 'x', expected its description": ("ZeRO: a description of text",),
    "got 1, expected its description": ("ZeRO: codes that are a number",),
    "not a file of ZeRO's states: no optimizer_state_dict in it": ("ZeRO: none of ZeRO's",),
    "not metadata of torch.distributed.checkpoint: got a value of t": (
        "DCP: os.system",
        "DCP: a module of this process",
        "DCP: another object",
    ),
    "not metadata of torch.distributed.checkpoint: got None": ("DCP: a memo of 2^31",),
    "got a file '../x.distcp', expected a name in the same folder": ("DCP: a file above",),
    "got a file '/etc/passwd', expected a name in the same folder": ("DCP: an absolute file",),
    "got a file '..', expected a name in the same folder": ("DCP: the folder above",),
    "got a file '', expected a name in the same folder": ("DCP: no file",),
    "got a file 'a\\x00b', expected a name in the same folder": ("DCP: a file with a zero in it",),
    "got a file 3, expected a name in the same folder": ("DCP: a file of a number",),
    "got a file a value of type list, expected a name": ("DCP: a file of laughs",),
    "No such file or directory": ("DCP: a file that is not there",),
    "got a folder": (
        "DCP: a folder for a file",
        "folder: a folder of states",
    ),
    "got a place from -1, of 1624 bytes": ("DCP: a negative offset",),
    "got a place from 0, of -1 bytes": ("DCP: a negative length",),
    "got 1624 bytes, expected some from 0 to 68719476736": ("DCP: a length beyond",),
    "got 1624 bytes, expected some from 2305843009213693952 to 2305": ("DCP: an offset beyond",),
    "got a place from '0', of 1624 bytes": ("DCP: an offset of text",),
    "got a tensor that is compressed or encrypted, which zero8 does": ("DCP: compressed",),
    "got a chunk without a place in a file": ("DCP: no place",),
    "got two places of the chunk at (0, 0)": ("DCP: two places",),
    "got ((4, 64), torch.float32) for state.p.exp_avg": (
        "DCP: another dtype",
        "DCP: another shape",
        "DCP: one column of 2^40 rows",
    ),
    "got chunks that overlap, or do not cover the tensor": (
        "DCP: a chunk twice",
        "DCP: chunks that overlap",
        "DCP: chunks that are not all",
    ),
    "got a chunk at (1, 0) that is not inside (4, 64)": ("DCP: a chunk outside",),
    "got a chunk at (0,) that is not inside (4, 64)": ("DCP: a chunk of other dimensions",),
    "got a chunk twice": (
        "DCP: a million chunks",
        "DCP: sizes of laughs",
    ),
    "got impossible sizes or offsets of a chunk": (
        "DCP: sizes of 10^6 dimensions",
        "DCP: negative sizes",
    ),
    "(1020000 characters), expected a key": ("DCP: a key of 10^6 characters",),
    "got 3": ("DCP: keys of anything",),
    "damaged, got '../x', expected the name of a tag": ("folder: latest above",),
    "damaged, got '/etc', expected the name of a tag": ("folder: latest absolute",),
    "damaged, got '.', expected the name of a tag": ("folder: latest of itself",),
    "damaged, got '..', expected the name of a tag": ("folder: latest the folder above",),
    "damaged, got '', expected the name of a tag": ("folder: latest empty",),
    "damaged, got 'a\\x00b', expected the name of a tag": ("folder: latest with a zero",),
    "damaged, expected the name of a tag: 'utf-8' codec": ("folder: latest no text",),
    "damaged, expected the name of a tag: got more than": ("folder: latest of 1 GiB",),
    "got 'global_step3', which is not a folder beside it": ("folder: latest not there",),
    "not a checkpoint that zero8 knows; expected a file of torch.save,": (
        "folder: latest of a folder without anything",
        "folder: nothing",
    ),
    "got 'tag', which is not a folder beside it": ("folder: tags for ever",),
    "its description is damaged": (
        "folder: swap: a description beyond",
        "folder: swap: nested lists",
        "folder: swap: a list",
        "folder: swap: an empty list of moments",
        "folder: swap: a number of 5000 digits",
    ),
    "got a value of type list, expected its description": ("folder: swap: lists of moments",),
    "got moments ['exp_avg']": ("folder: swap: one moment alone",),
    "got moments ['exp_avg_sq', 'exp_avg']": ("folder: swap: moments exchanged",),
    "got 4096 bytes with tensors of (0, 0, 0, 0, 0, 0, 0)": ("folder: swap: 2^48 elements",),
    "got 4096 bytes with tensors of ()": ("folder: swap: no numbers",),
    "got a header with 4294967295 and 4294967295 numbers": ("folder: swap: 2^32 numbers",),
    "got a header with 1 and 60 numbers": ("folder: swap: more numbers than the header holds",),
}
"""What the errors say, and of which cases: each is refused for what is wrong with it."""


@pytest.fixture(scope="module")
def results():
    code = "import crafted_cases; crafted_cases.work()"
    path = os.pathsep.join([*FOLDERS, *sys.path])
    found = {}
    with started([sys.executable, "-c", code], PYTHONPATH=path, OMP_NUM_THREADS="1") as process:
        out, err = process.communicate(timeout=120)
    for line in out.splitlines():
        case, result = json.loads(line)
        found[case] = result
    if len(found) < len(CASES):
        found[CASES[len(found)]] = {"error": f"died with status {process.returncode}: {err[-500:]}"}
    return found


@pytest.mark.parametrize("case", CASES)
def test_crafted_file_gets_an_error_with_its_name_at_once(results, case):
    result = results[case]
    assert result["error"] == "ok", result
    assert result["names it"], result
    assert any(text in result["message"] for text, cases in SAYS.items() if case in cases), result
    assert result["s"] < MAX_SECONDS and result["mib"] < MAX_MIB, result
    assert result["effects"] == []


def test_good_files_of_the_same_make_are_read(tmp_path):
    """Otherwise they would be refused for what is not meant."""
    (tmp_path / "adam.pt").write_bytes(with_moments(tensor(floats(), [256], [1])))
    (fragment,) = open_checkpoint(tmp_path / "adam.pt").all_fragments()
    assert (fragment.step, fragment.memory) == (1, {"history": UNKNOWN_HISTORY})
    (tmp_path / "rank").mkdir()
    path = tmp_path / "rank" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    path.write_bytes(with_first_moment(history=value(1.0), exp_avg_sq=second_moment()))
    (fragment,) = open_checkpoint(tmp_path / "rank").all_fragments()
    assert (fragment.step, fragment.memory) == (1, {"history": 1.0})
    (tmp_path / "ours.pt").write_bytes(with_codes("step", value(7)))
    (fragment,) = open_checkpoint(tmp_path / "ours.pt").all_fragments()
    assert (fragment.step, fragment.is_quantized) == (7, True)
    dcp_folder(tmp_path / "dcp", metadata())
    (fragment,) = open_checkpoint(tmp_path / "dcp").all_fragments()
    assert fragment.stores[0].table.numel == 256
