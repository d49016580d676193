#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Start torchrun on every host of a hostfile, over ssh.  When one fails, or its host is lost, all end.
#
# usage: launch/torchrun.sh [-m] SCRIPT [ARGUMENT ...], with these environment variables [defaults]:
#   HOSTFILE       lines "HOST slots=RANKS", the same number of ranks in all [launch/hostfile]
#   PYTHON         interpreter, at the same path on every host [.venv/bin/python, else python3]
#   LAUNCHER_ARGS  more options of torchrun, split at spaces: "--max-restarts 4" []
#   EXPORT         more variables that ranks get, a pattern: "WANDB_.*|MY_KEY" []
#   MASTER_ADDR, MASTER_PORT  where hosts meet [the first host, 29500]
#   OMP_NUM_THREADS  threads of each rank [cores of this host / ranks of the first]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
source "$here/numa.sh" "$PYTHON" "${slots[0]}" # other hosts are taken to be like this one

for count in "${slots[@]}"; do
  ((count == slots[0])) || die "$HOSTFILE: torchrun needs the same slots on every host"
done
read -ra more <<<"${LAUNCHER_ARGS:-}"
# By default all rounds of restarts share one store, in which a rank can find the address that its
# peer had before (pytorch #135712); without it, each round has a new store.
command=(env TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1)
for name in "${variables[@]}"; do
  command+=("$name=${!name}")
done
command+=("$PYTHON" -m torch.distributed.run --nnodes "${#hosts[@]}" --nproc-per-node "${slots[0]}"
  --rdzv-backend c10d --rdzv-endpoint "$MASTER_ADDR:$MASTER_PORT" --rdzv-id "zero8-$$" "${numa[@]}"
  "${more[@]}" "$@")
printf -v remote '%q ' "${command[@]}"
printf -v folder '%q' "$PWD"

# With a terminal (-tt), the end of an ssh hangs up on its torchrun, which then ends its ranks.
trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT
trap 'exit 130' INT TERM HUP
for host in "${hosts[@]}"; do
  ssh -tt "${ssh_options[@]}" "$host" "cd $folder && exec $remote" </dev/null &
done
for host in "${hosts[@]}"; do
  wait -n # the first error is the script's
done
