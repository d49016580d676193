#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
set -euo pipefail

usage='usage: launch/deepspeed.sh [--dry-run] [--help] SCRIPT [ARGUMENT ...]

Start a rank per slot of every host by DeepSpeed'"'"'s launcher, over pdsh and ssh.
'
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

read_hosts
check_hosts

# DeepSpeed carries few variables to the hosts by itself, but all that are in this file.  It may hold
# secrets, so it has no name any more: job.py, which takes the place of this process, holds it open.
file=$(mktemp)
exec 9<>"$file"
rm "$file"
for name in $(exported); do
  echo "$name=${!name}"
done >&9
export DS_ENV_FILE=/proc/$$/fd/9

rank_command --ranks "$ranks"
run "${job[@]}" --grace-s "$GRACE_S" --ranks "$ranks" --hosts "$names" \
  "$PYTHON" -m deepspeed.launcher.runner --hostfile "$HOSTFILE" --force_multi --launcher pdsh \
  --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT" --no_local_rank --no_ssh_check \
  "${rank[@]}"
