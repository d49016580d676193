#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
set -euo pipefail

usage='usage: launch/torchrun.sh [--dry-run] [--help] SCRIPT [ARGUMENT ...]

Start torchrun on every host of HOSTFILE, over pdsh and ssh; or, with RENDEZVOUS set, on this host
only, as a cluster manager that starts one command per host wants it.  Ranks are started again
RESTARTS times when one has failed; scripts must then go on from a checkpoint (examples.gpt --resume).

  RENDEZVOUS  HOST:PORT where the hosts meet; the others must be given the same []
  RUN_ID      any name, the same on all hosts [the name of RUN_DIR]
  HOSTS       with RENDEZVOUS: how many hosts [1]
  RANKS       with RENDEZVOUS: ranks of this host [1]
  RESTARTS    how often ranks are started again; give 2 per failure that is expected [0]
  MIN_HOSTS   go on with as few hosts as this, and take hosts in that come back [all hosts]
  JOIN_S      how long hosts wait for each other [60; 600 without MIN_HOSTS]
'
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
RESTARTS=${RESTARTS:-0}
JOIN_S=${JOIN_S:-$([[ ${MIN_HOSTS:-} ]] && echo 60 || echo 600)}
# Ranks that are started again have to wait for the other hosts first.
restarts=() grace_s=$GRACE_S
((RESTARTS == 0)) || restarts=(--restarts) grace_s=$((GRACE_S + JOIN_S))

if [[ -z ${RENDEZVOUS:-} ]]; then
  read_hosts
  check_hosts
  each=$(equal_slots)
  settings=(RENDEZVOUS="$MASTER_ADDR:$MASTER_PORT" RUN_ID="${RUN_DIR##*/}" HOSTS="${#hosts[@]}"
    RANKS="$each" NAMES="$names" RESTARTS="$RESTARTS" MIN_HOSTS="${MIN_HOSTS:-${#hosts[@]}}"
    JOIN_S="$JOIN_S" PYTHON="$PYTHON" RUN_DIR="$RUN_DIR" TIMEOUT_S="$TIMEOUT_S" GRACE_S="$GRACE_S")
  for name in $(exported); do
    settings+=("$name=${!name}")
  done
  printf -v remote '%q ' env "${settings[@]}" "$here/torchrun.sh" "${command[@]}"
  ! [[ ${MIN_HOSTS:-} ]] || ranks=0 # any number may be left
  run "${job[@]}" --grace-s "$grace_s" --ranks "$ranks" --hosts "$names" "${restarts[@]}" \
    pdsh -S -f 128 -w "$names" "cd $(printf %q "$PWD") && exec $remote"
  exit
fi

# With torch 2.13 a host that comes back ends the job, unless each world has a store of its own.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
hosts=${HOSTS:-1} names=${NAMES:-}
[[ ${MIN_HOSTS:-$hosts} == "$hosts" ]] || hosts=$MIN_HOSTS:$hosts
rank_command
# This host's torchrun is a job of its own: one that waits for hosts that are gone must end, too.
run "${job[@]}" --grace-s "$grace_s" "${restarts[@]}" \
  "$PYTHON" -m torch.distributed.run --nnodes "$hosts" --nproc-per-node "${RANKS:-1}" \
  --rdzv-backend c10d --rdzv-endpoint "$RENDEZVOUS" --rdzv-id "${RUN_ID:-${RUN_DIR##*/}}" \
  --rdzv-conf "join_timeout=$JOIN_S,last_call_timeout=3" --max-restarts "$RESTARTS" "${rank[@]}"
