# SPDX-License-Identifier: Apache-2.0
"""Nodes of memory: what is read of false hosts, and where states are on an emulated one."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from needs import need_guest
from places import ROOT, SUPPORT

from zero8 import doctor
from zero8.environment import host_memory
from zero8.op import build

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
    "not at its GPU": (TWO, "0-1", {0, 11}, [0x1B, 0x9A], "1", [0], "on node 0 of the host's"),
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
    monkeypatch.setattr(host_memory, "SYSFS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: allowed)
    monkeypatch.setattr(doctor.torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(doctor.torch.cuda, "get_device_properties", found.__getitem__)
    monkeypatch.setattr(os, "environ", {"LOCAL_RANK": rank} if rank else {})
    report = {"lines": [], "warnings": []}
    assert doctor._numa(report)["own"] == own
    assert len(report["warnings"]) == (warning is not None)
    assert (warning or "") in "".join(report["warnings"])


# --- An emulated host of two nodes, a processor at each, with this one's files --------------------

INIT = """#!/busybox sh
/busybox mkdir /host
for module in {modules}; do /busybox insmod /$module; done
/busybox mount -t 9p -o trans=virtio,version=9p2000.L,ro,cache=loose,msize=1048576 host /host
/busybox mount -t proc proc /host/proc
/busybox mount -t sysfs sys /host/sys
/busybox mount -t devtmpfs dev /host/dev
/busybox chroot /host /usr/bin/env -i {command}
/busybox poweroff -f
"""
MACHINE = """qemu-system-x86_64 -nodefaults -display none -no-reboot -serial stdio -accel tcg
 -cpu max -smp 2 -m 2G -object memory-backend-ram,id=m0,size=1G
 -object memory-backend-ram,id=m1,size=1G -numa node,cpus=0,memdev=m0 -numa node,cpus=1,memdev=m1
 -virtfs local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap"""
KERNEL = "console=ttyS0 panic=-1 quiet transparent_hugepage=never numa_balancing=disable"


def output_of(command, **options):
    options = {"input": ""} | options
    return subprocess.run(command, capture_output=True, check=True, text=True, **options).stdout


def run_in_guest(command, folder):
    """Return what a command prints there, where it cannot write."""
    kernel = need_guest()
    depends = ["/sbin/modprobe", "-S", kernel.name.removeprefix("vmlinuz-"), "--show-depends", "-a"]
    shown = output_of([*depends, "virtio_pci", "9pnet_virtio", "9p"])
    modules = [Path(path) for path in dict.fromkeys(shown.split()[1::2])]
    for file in ("/bin/busybox", *modules):
        shutil.copy(file, folder)
    names = [module.name for module in modules]
    (folder / "init").write_text(INIT.format(modules=" ".join(names), command=command))
    (folder / "init").chmod(0o755)
    pack = ["busybox", "cpio", "-o", "-H", "newc", "-F", "initrd"]
    output_of(pack, cwd=folder, input="\n".join(["init", "busybox", *names]))
    boot = ["-kernel", kernel, "-initrd", folder / "initrd", "-append", KERNEL]
    return output_of([*MACHINE.split(), *boot], timeout=1500)


@pytest.mark.slow
def test_states_on_an_emulated_host_of_two_nodes_are_where_they_are_stepped(tmp_path):
    build.load()
    variables = {
        "PYTHONPATH": os.environ.get("PYTHONPATH", ROOT),
        "TORCH_EXTENSIONS_DIR": build.cache_root(),
        "TMPDIR": "/dev",
        "MALLOC_MMAP_THRESHOLD_": 2**20,  # tensors get no pages of others that are gone
        "OMP_NUM_THREADS": 2,
        "OMP_PROC_BIND": "true",
        "OMP_PLACES": "cores",
    }
    settings = " ".join(f"{name}={value}" for name, value in variables.items())
    program = f"{sys.executable} -B {SUPPORT / 'numa_guest.py'}"
    printed = run_in_guest(f"{settings} {program}", tmp_path)
    line = re.search("^found (.*)$", printed, re.MULTILINE)
    assert line, printed
    found = json.loads(line[1])
    for name in ("made", "stepped", "loaded"):
        assert [node for node, _ in found[name]] == [0, 1], found
        assert abs(found[name][0][1] - found[name][1][1]) <= 4, found
    assert [node for node, _ in found["bound"]] == [1], found
    assert found["placed"] == [[[0, 1], [0, 1], []], [[0, 1], [1], []]]
