#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Start a rank per slot of every host of a hostfile by DeepSpeed's launcher, over pdsh and ssh.
#
# usage: launch/deepspeed.sh [-m] SCRIPT [ARGUMENT ...], with these environment variables [defaults]:
#   HOSTFILE       lines "HOST slots=RANKS" [launch/hostfile]
#   PYTHON         interpreter, at the same path on every host [.venv/bin/python, else python3]
#   LAUNCHER_ARGS  more options of deepspeed, split at spaces: "--enable_each_rank_log logs" []
#   EXPORT         more variables that ranks get, a pattern: "WANDB_.*|MY_KEY" []
#   MASTER_ADDR, MASTER_PORT  where ranks meet [the first host, 29500]
#   OMP_NUM_THREADS  threads of each rank [cores of this host / ranks of the first]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# DeepSpeed itself carries few variables to the hosts, but all that are in this file.  It may hold
# secrets, so it has no name any more: the launcher holds it open.
file=$(mktemp)
exec 9<>"$file"
rm "$file"
for name in "${variables[@]}"; do
  echo "$name=${!name}"
done >&9
export DS_ENV_FILE=/proc/$$/fd/9

# With a terminal (-tt), ranks end when their ssh does.
export PDSH_SSH_ARGS_APPEND="-tt ${ssh_options[*]} ${PDSH_SSH_ARGS_APPEND:-}"
read -ra more <<<"${LAUNCHER_ARGS:-}"
[[ $1 != -m ]] || set -- --module "${@:2}"
exec "$PYTHON" -m deepspeed.launcher.runner --hostfile "$HOSTFILE" --force_multi --no_ssh_check \
  --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT" --no_local_rank "${more[@]}" "$@"
