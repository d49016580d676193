#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
set -euo pipefail

usage='usage: launch/mpirun.sh [--dry-run] [--help] SCRIPT [ARGUMENT ...]

Start a rank per slot of every host by mpirun, of Open MPI, MPICH or Intel MPI.  The ranks talk by
gloo or NCCL; MPI only starts them.  Before that, mpi4py gathers what every rank has: host, Python,
versions, instruction set; if they differ nothing is started.

  MPIRUN       mpirun, of the MPI that mpi4py loads [mpirun]
  MPIRUN_ARGS  more arguments for it, split at spaces []
  CHECK        0: without mpi4py and what it checks [1]
'
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
MPIRUN=${MPIRUN:-mpirun}

read_hosts
check_hosts
command -v "$MPIRUN" >/dev/null || die "no $MPIRUN (pip install zero8[mpi], or your cluster's module)"

read -ra start <<<"$MPIRUN ${MPIRUN_ARGS:-}"
mapfile -t variables < <(exported)
case $("$MPIRUN" --version) in
  *"Open MPI"* | *OpenRTE*)
    start+=(--hostfile "$HOSTFILE" -np "$ranks" --bind-to none)
    ((EUID)) || start+=(--allow-run-as-root)
    if [[ ${GLOO_SOCKET_IFNAME:-} ]]; then
      start+=(--mca oob_tcp_if_include "$GLOO_SOCKET_IFNAME")
      start+=(--mca btl_tcp_if_include "$GLOO_SOCKET_IFNAME")
    fi
    for name in "${variables[@]}"; do
      start+=(-x "$name")
    done
    ;;
  *HYDRA* | *MPICH* | *Intel*)
    printf -v with_slots '%s,' $(paste -d: <(printf '%s\n' "${hosts[@]}") <(printf '%s\n' "${slots[@]}"))
    start+=(-hosts "${with_slots%,}" -np "$ranks" -genvlist "$(IFS=, && echo "${variables[*]}")")
    ;;
  *) die "$MPIRUN is not of Open MPI, MPICH or Intel MPI" ;;
esac

if [[ ${CHECK:-1} != 0 ]]; then
  check=("${start[@]}" "$PYTHON" "$here/mpi_world.py" "$ranks")
  if [[ $is_dry ]]; then
    run "${check[@]}"
  else
    timeout --foreground --kill-after=10 300 "${check[@]}" || die "the world is not as it should be"
  fi
fi
rank_command --ranks "$ranks" --master "$MASTER_ADDR:$MASTER_PORT"
run "${job[@]}" --grace-s "$GRACE_S" --ranks "$ranks" --hosts "$names" \
  "${start[@]}" "$PYTHON" "${rank[@]}"
