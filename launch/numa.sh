# SPDX-License-Identifier: Apache-2.0
#
# Sourced with an interpreter and the number of a host's ranks.  Sets `numa`, the options by which
# torchrun runs each rank on the node of its GPU, if this host's memory has several (NUMA).  torchrun
# does it by numactl, which not every container permits, and asks torch and sysfs for the GPUs.

numa=()
if grep -qs '[-,]' /sys/devices/system/node/has_memory &&
  grep -qs '^[0-9]' /sys/bus/pci/drivers/nvidia/*/numa_node &&
  numactl --localalloc true 2>/dev/null &&
  "$1" -c 'import sys, torch; sys.exit(torch.cuda.device_count() < int(sys.argv[1]))' "$2"; then
  numa=(--numa-binding node)
fi
