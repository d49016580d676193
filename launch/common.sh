# SPDX-License-Identifier: Apache-2.0
#
# What the launchers of several hosts share; sourced by them.  Each has, before it sources this, set
# `usage` to the words that --help prints.
#
# Leaves, for the launcher: the arrays `command` (what a rank runs), `hosts` and `slots`; `names` (the
# hosts with commas), `ranks` (of the world), and the settings below.

die() {
  echo "zero8: $*" >&2
  exit 2
}

# The settings: from the environment, with these defaults.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
PYTHON=${PYTHON:-${here%/*}/.venv/bin/python}
[[ -x $PYTHON ]] || PYTHON=$(command -v python3) || die "no python3 on PATH; set PYTHON"
HOSTFILE=${HOSTFILE:-$here/hostfile}
RUN_DIR=${RUN_DIR:-runs/$(date +%Y%m%d-%H%M%S)-$$}
TIMEOUT_S=${TIMEOUT_S:-600}
GRACE_S=${GRACE_S:-30}
MASTER_PORT=${MASTER_PORT:-$((20000 + $$ % 10000))}
# Variables whose names begin so go to every host, and those that EXPORT names.
EXPORT="PATH LD_LIBRARY_PATH VIRTUAL_ENV PYTHON OMP_ KMP_ GLOO_ NCCL_ UCX_ TORCH_ CUDA_HOME HF_ \
TOKENIZERS_ WANDB_ DS_ DEEPSPEED_ ZERO8_ ${EXPORT:-}"

# DeepSpeed takes ops for out of date when another ninja has built them: that of this Python is first.
PATH=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("scripts"))'):$PATH

common_usage='  SCRIPT [ARGUMENT ...]   a Python script and its arguments, or
  -m MODULE [ARGUMENT ...]   a module: -m examples.gpt --engine deepspeed
  --dry-run   print the command and end
  --help      print this and end

Settings, from the environment [and what they are by default]:
  HOSTFILE   lines "HOST slots=RANKS"; see launch/hostfile.example [launch/hostfile]
  PYTHON     interpreter, at the same path on every host [.venv/bin/python, else python3]
  RUN_DIR    folder for the log of each rank, node-HOST-rank-RANK.log [runs/DATE-TIME-PROCESS]
  TIMEOUT_S  a rank that waits for others, or gives no sign of life, for longer is ended [600]
  GRACE_S    what the others have to end when a rank has failed [30]
  MASTER_ADDR, MASTER_PORT   where ranks meet [the first host, a port of 20000 to 29999]
  GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME   network interface [the one that leads to the others]
  EXPORT     more names, or beginnings of names, of variables that ranks get
             [PATH, and those beginning with OMP_ GLOO_ NCCL_ TORCH_ HF_ DS_ ZERO8_ and some more]'

# Take the command line apart.
is_dry=
while (($#)); do
  case $1 in
    --dry-run) is_dry=1 ;;
    --help | -h)
      echo "$usage"
      echo "$common_usage"
      exit
      ;;
    -m)
      break
      ;;
    -*) die "got $1, expected --dry-run, --help, -m or a script; see --help" ;;
    *) break ;;
  esac
  shift
done
(($#)) || die "expected a script, or -m and a module; see --help"
command=("$@")

# Print a command so that a shell would read it back, or run it in the place of this one.
run() {
  if [[ $is_dry ]]; then
    printf '%q ' "$@"
    echo
  else
    exec "$@"
  fi
}

# Read HOSTFILE into `hosts`, `slots`, `names` and `ranks`.
read_hosts() {
  [[ -r $HOSTFILE ]] || die "no hostfile at $HOSTFILE: copy launch/hostfile.example, or set HOSTFILE"
  hosts=() slots=() ranks=0
  local host rest
  while read -r host rest; do
    [[ -z $host || $host == '#'* ]] && continue
    [[ $rest =~ ^slots=([1-9][0-9]*)[[:space:]]*(#.*)?$ ]] ||
      die "$HOSTFILE: got \"$host $rest\", expected HOST slots=RANKS"
    [[ " ${hosts[*]} " != *" $host "* ]] || die "$HOSTFILE: names $host twice"
    hosts+=("$host") slots+=("${BASH_REMATCH[1]}")
    ((ranks += BASH_REMATCH[1]))
  done <"$HOSTFILE"
  ((ranks)) || die "$HOSTFILE: names no host"
  names=$(IFS=, && echo "${hosts[*]}")
  MASTER_ADDR=${MASTER_ADDR:-${hosts[0]}}
}

# All hosts with the same number of slots: print it.
equal_slots() {
  local count
  for count in "${slots[@]}"; do
    ((count == slots[0])) || die "$HOSTFILE: this launcher needs the same slots on every host"
  done
  echo "${slots[0]}"
}

# What pdsh and ssh need to notice a host that is gone, in 15 s; and to ask for no password.
export PDSH_RCMD_TYPE=ssh
export PDSH_SSH_ARGS_APPEND="-oBatchMode=yes -oConnectTimeout=10 -oServerAliveInterval=5 \
-oServerAliveCountMax=3 ${PDSH_SSH_ARGS_APPEND:-}"

# Fail at once, with the host's name, if one cannot be reached or lacks this folder or this Python.
check_hosts() {
  [[ $is_dry ]] && return
  command -v pdsh >/dev/null || die "pdsh is not installed (Debian and Ubuntu: apt-get install pdsh)"
  local check
  printf -v check 'cd %q && test -x %q || { echo "no %q or %q here"; exit 1; }' \
    "$PWD" "$PYTHON" "$PWD" "$PYTHON"
  local said
  if said=$(pdsh -S -f 128 -w "$names" "$check" 2>&1); then
    return
  fi
  echo "$said" >&2
  die "cannot run on the host(s) named above: is ssh without a password set up, and is \
$HOSTFILE right?"
}

# Print the names of the variables that every rank gets.
exported() {
  local name prefix
  compgen -e | while read -r name; do
    for prefix in $EXPORT; do
      if [[ $name == "$prefix"* && ${!name} != *$'\n'* ]]; then
        echo "$name"
        break
      fi
    done
  done
}

# The command of a rank, for launchers to start, after their own Python; sets `rank`.
rank_command() {
  rank=("$here/rank.py" --hosts "$names" --run-dir "$RUN_DIR" --timeout-s "$TIMEOUT_S" "$@")
  rank+=("${command[@]}")
}

job=("$PYTHON" "$here/job.py")
