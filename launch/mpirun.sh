#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Start a rank per slot of every host of a hostfile by mpirun, of Open MPI, MPICH or Intel MPI.  Ranks
# talk by gloo or NCCL; MPI only starts them.  Before that, mpi4py compares the versions of all ranks.
#
# usage: launch/mpirun.sh [-m] SCRIPT [ARGUMENT ...], with these environment variables [defaults]:
#   HOSTFILE       lines "HOST slots=RANKS" [launch/hostfile]
#   PYTHON         interpreter, at the same path on every host [.venv/bin/python, else python3]
#   MPIRUN         mpirun, of the MPI that mpi4py loads [mpirun]
#   LAUNCHER_ARGS  options of mpirun, split at spaces [--bind-to none]
#   CHECK          0: without mpi4py, and its comparison of versions [1]
#   EXPORT         more variables that ranks get, a pattern: "WANDB_.*|MY_KEY" []
#   MASTER_ADDR, MASTER_PORT  where ranks meet [the first host, 29500]
#   OMP_NUM_THREADS  threads of each rank [cores of this host / ranks of the first]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

export MASTER_ADDR MASTER_PORT
variables+=(MASTER_ADDR MASTER_PORT)
MPIRUN=${MPIRUN:-mpirun}
command -v "$MPIRUN" >/dev/null || die "no $MPIRUN (pip install zero8[mpi], or your cluster's module)"
places=$(paste -sd, <(paste -d: <(printf '%s\n' "${hosts[@]}") <(printf '%s\n' "${slots[@]}")))
read -ra more <<<"${LAUNCHER_ARGS:---bind-to none}"
start=("$MPIRUN" --host "$places" -np "$ranks" "${more[@]}")
# Open MPI notices within 15 s that a host is gone; by default it takes 8 minutes.
export OMPI_MCA_oob_tcp_keepalive_time=5 OMPI_MCA_oob_tcp_keepalive_intvl=5
export OMPI_MCA_oob_tcp_keepalive_probes=2
if [[ $("$MPIRUN" --version) == *Open* ]]; then
  for name in "${variables[@]}"; do
    start+=(-x "$name")
  done
fi

[[ ${CHECK:-1} == 0 ]] || "${start[@]}" "$PYTHON" "$here/mpi_world.py" "$ranks"
# torch.distributed reads from these who a rank is; Open MPI and MPICH call them by other names.
# shellcheck disable=SC2016  # the ranks expand it
as_rank='export RANK=${OMPI_COMM_WORLD_RANK:-$PMI_RANK} WORLD_SIZE=${OMPI_COMM_WORLD_SIZE:-$PMI_SIZE}
export LOCAL_RANK=${OMPI_COMM_WORLD_LOCAL_RANK:-$MPI_LOCALRANKID}
exec "$@"'
exec "${start[@]}" sh -uc "$as_rank" rank "$PYTHON" -u "$@"
