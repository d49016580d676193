# SPDX-License-Identifier: Apache-2.0
#
# What the launchers over ssh share; sourced by them.  Reads HOSTFILE, and sets `hosts` and `slots`,
# arrays of the same length, and `ranks`, the number of all.

die() {
  echo "zero8: $*" >&2
  exit 2
}

# The comment at the top of the script is its help.
if (($# == 0)) || [[ $1 == --help ]]; then
  sed -n '3,/^set/s/^# \{0,1\}//p' "$0"
  exit $(($# == 0 ? 2 : 0))
fi

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
PYTHON=${PYTHON:-${here%/*}/.venv/bin/python}
[[ -x $PYTHON ]] || PYTHON=$(command -v python3) || die "no python3 on PATH; set PYTHON"
# DeepSpeed takes ops for out of date when another ninja has built them: that of this Python is first.
export PATH=${PYTHON%/*}:$PATH

HOSTFILE=${HOSTFILE:-$here/hostfile}
[[ -r $HOSTFILE ]] || die "no hostfile at $HOSTFILE: copy launch/hostfile.example, or set HOSTFILE"
hosts=() slots=() ranks=0
while read -r host rest; do
  [[ -z $host || $host == '#'* ]] && continue
  [[ $rest =~ ^slots=([1-9][0-9]*)[[:space:]]*$ ]] ||
    die "$HOSTFILE: got \"$host $rest\", expected HOST slots=RANKS"
  hosts+=("$host") slots+=("${BASH_REMATCH[1]}")
  ((ranks += BASH_REMATCH[1]))
done <"$HOSTFILE"
((ranks)) || die "$HOSTFILE: names no host"
MASTER_ADDR=${MASTER_ADDR:-${hosts[0]}}
MASTER_PORT=${MASTER_PORT:-29500}

# zero8's step on the CPU is as fast as its threads are many; torchrun would set one.
threads=$(($(env -u OMP_NUM_THREADS nproc) / slots[0]))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}

# The variables that every rank gets.  Slurm and MPICH pass on all; ssh none.
carried='PATH|LD_LIBRARY_PATH|(PYTHON|OMP_|GLOO_|NCCL_|TORCH_|CUDA_|HF_|DS_|DEEPSPEED_|ZERO8_).*'
mapfile -t variables < <(compgen -e | grep -xE "$carried${EXPORT:+|$EXPORT}")

# ssh asks for no password, and notices within 15 s that a host is gone.
ssh_options=(-oBatchMode=yes -oConnectTimeout=10 -oServerAliveInterval=5 -oServerAliveCountMax=3)
