# SPDX-License-Identifier: Apache-2.0
"""Extrapolates to other machines: whether cores or memory limit the step.

A step over data in memory takes at least

    ns/param = max(ns of one core in the cache / cores, bytes per parameter / bandwidth)        (B1)

so `bandwidth * ns of one core / bytes` cores saturate the memory, and more do not help.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """A machine with cores as fast as the measured ones.

    Attributes:
        name: its name in reports.
        cores: number of cores.
        gb_per_s: bandwidth of its memory, reads and writes together.
    """

    name: str
    cores: int
    gb_per_s: float

    def ns_per_param(self, ns_in_cache: float, bytes_per_param: float) -> float:
        """Return the bound (B1)."""
        return max(ns_in_cache / self.cores, bytes_per_param / self.gb_per_s)

    def saturating_cores(self, ns_in_cache: float, bytes_per_param: float) -> float:
        """Return the number of cores that saturate the memory."""
        return self.gb_per_s * ns_in_cache / bytes_per_param


STEP = ("algorithm", "variant", "codec")
"""What tells zero8's steps apart."""

OTHERS = (Machine("desktop", 8, 80.0), Machine("server", 64, 200.0))


def machines(result: dict) -> list[Machine]:
    """Return the machine of a result, with the bandwidth of its fastest copy, and two others."""
    copied = [row["gb_per_s"] for row in result["rows"] if row["name"] == "copy"]
    return [Machine("this one", result["threads"], max(copied)), *OTHERS]


def rows(result: dict) -> list[dict]:
    """Return the bounds of zero8's steps on each of `machines`.

    Only for steps that were also timed in the cache with the same instruction set.
    """
    in_cache = {
        tuple(row[name] for name in (*STEP, "isa")): row["ns_per_param"]
        for row in result["in_cache"]
    }
    found = []
    for row in (row for row in result["rows"] if row["name"] == "zero8"):
        ns = in_cache.get(tuple(row[name] for name in (*STEP, "isa")))
        if ns is None:
            continue
        step = {name: row[name] for name in ("name", *STEP, "bytes_per_param")}
        on = [
            {
                "machine": machine.name,
                "saturating_cores": machine.saturating_cores(ns, row["bytes_per_param"]),
                "ns_per_param": machine.ns_per_param(ns, row["bytes_per_param"]),
            }
            for machine in machines(result)
        ]
        found.append({**step, "ns_in_cache": ns, "on": on})
    return found
