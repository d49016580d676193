# SPDX-License-Identifier: Apache-2.0
"""Nodes of memory: what is read of false hosts."""

import os
from types import SimpleNamespace

import pytest

from zero8 import doctor
from zero8.environment import numa

GPUS = {0x1B: 0, 0x9A: 1, 0xC0: -1}  # node by bus
ONE, TWO, MEMORY_ONLY = ["0-7"], ["0-3,8-11", "4-7,12-15"], ["0-7", ""]
ALL = set(range(16))
CASES = {
    # processors by node, nodes with memory, of the process, GPUs, rank -> own nodes, its warning
    "one node": (ONE, "0", ALL, [0x1B], None, [0], None),
    "no sysfs": ([], "", ALL, [0x1B], None, [], None),
    "on both": (TWO, "0-1", ALL, [0x1B, 0x9A], "0", [0, 1], "may run on nodes 0, 1 of"),
    "on both, no GPU": (TWO, "0,1", {3, 12}, [], "0", [0, 1], "--numa-binding node"),
    "at one of its GPUs": (TWO, "0-1", {8}, [0x1B, 0x9A], None, [0], None),
    "at its GPU": (TWO, "0-1", {4, 15}, [0x1B, 0x9A], "1", [1], None),
    "not at its GPU": (
        TWO,
        "0-1",
        {0, 11},
        [0x1B, 0x9A],
        "1",
        [0],
        "on node 0 of the host's memory, exp",
    ),
    "alone not at its GPU": (TWO, "0-1", {0, 11}, [0x9A], "3", [0], "expected 1 of its GPU"),
    "unknown GPU": (TWO, "0-1", {0}, [0xC0], "0", [0], None),
    "GPU not in sysfs": (TWO, "0-1", {0}, [0xFF], "0", [0], None),
    "no GPU": (TWO, "0-1", {0}, [], "0", [0], None),
    "second without memory": (TWO, "0", ALL, [0x1B], None, [0], None),
    "second without processors": (MEMORY_ONLY, "0-1", ALL, [0x1B], None, [0], None),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_doctor_on_a_false_host_warns_of_what_is_slow(tmp_path, monkeypatch, case):
    processors, with_memory, allowed, gpus, rank, own, warning = case
    files = {f"bus/pci/devices/0000:{bus:02x}:00.0/numa_node": GPUS[bus] for bus in GPUS}
    for node, theirs in enumerate(processors):
        files[f"devices/system/node/node{node}/cpulist"] = theirs
        files["devices/system/node/has_memory"] = with_memory
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{content}\n")
    found = [SimpleNamespace(pci_domain_id=0, pci_bus_id=bus, pci_device_id=0) for bus in gpus]
    monkeypatch.setattr(numa, "SYSFS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: allowed)
    monkeypatch.setattr(doctor.torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(doctor.torch.cuda, "get_device_properties", found.__getitem__)
    monkeypatch.setattr(os, "environ", {"LOCAL_RANK": rank} if rank else {})
    report = {"lines": [], "warnings": []}
    assert doctor._numa(report)["own"] == own
    assert len(report["warnings"]) == (warning is not None)
    assert (warning or "") in "".join(report["warnings"])
