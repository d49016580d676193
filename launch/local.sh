#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Train the same small GPT twice from the same seed on this machine: with one of zero8's optimizers, and
# with its fp32 twin, the AdamW, Lion, SGD or Muon of DeepSpeed or PyTorch. Then write OUT/summary.json
# and OUT/loss.png and print a table. Warnings of each rank are in OUT/*.log.
#
# usage: launch/local.sh [--help], with these environment variables [and defaults]:
#   ENGINE     deepspeed, or fsdp2 for pure PyTorch [deepspeed; with WEIGHTS=int8 fsdp2]
#   OPTIMIZER  Adam8bitBlockwise, SGD8bitBlockwise or, with deepspeed only, Lion8bitBlockwise or
#              Muon8bitBlockwise: PyTorch has no Lion, and its Muon takes only matrices [the first]
#   CODEC      of zero8's states: log, log6, dynamic, fp8 or linear4 [the config's, which is log]
#   WEIGHTS    of the linear layers in zero8's run: float32, or int8 for torchao's, with fsdp2 only, as
#              ZeRO flattens weights, and these have a scale per row [float32]
#   STEPS      optimizer steps of each run [400]
#   RANKS      processes [2; with CUDA the number of GPUs]
#   CONFIG     of the engine [configs/zero2_offload.json; with fsdp2 configs/fsdp2_offload.toml; with
#              another optimizer that file whose name also ends in _lion, _sgd or _muon]
#   MODEL      its size: demo (1.7 M parameters), 1b or 3b [demo]
#   DATA       text to train on, a file or folder [the Python standard library's own sources]
#   OUT        folder for the results [runs/demo, and behind it -fsdp2, -lion and so on, as set]
#   SEED       of initialization and batches [0]
#   PYTHON     interpreter [.venv/bin/python, else python3]
#   OMP_NUM_THREADS  threads of each rank [cores / RANKS, at least 1]
#   DS_ACCELERATOR   set to cpu to leave a GPU alone [cpu where there is no GPU]
# Relative paths count from the repository's root.
set -euo pipefail

die() {
  echo "zero8: $*" >&2
  exit 2
}

case ${1:-} in
  "") ;;
  --help)
    sed -n '/^# Train/,/^set/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit
    ;;
  *) die "got $1, expected --help or nothing" ;;
esac

cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-.venv/bin/python}
[[ -n ${PYTHON:-} || -x $python ]] || python=python3

optimizer=${OPTIMIZER:-Adam8bitBlockwise} weights=${WEIGHTS:-float32} engine=${ENGINE:-}
[[ -n $engine ]] || engine=$([[ $weights == int8 ]] && echo fsdp2 || echo deepspeed)
zero='deepspeed (Adam|SGD|Lion|Muon)8bitBlockwise float32'
[[ "$engine $optimizer $weights" =~ ^($zero|fsdp2 (Adam|SGD)8bitBlockwise (float32|int8))$ ]] ||
  die "got ENGINE=$engine OPTIMIZER=$optimizer WEIGHTS=$weights, expected what --help lists"
twin=${optimizer%8bitBlockwise}
kind=${twin,,} # as files and folders name it, but for Adam
[[ $twin != Adam ]] || twin=AdamW kind=
case $engine in
  deepspeed) config=configs/zero2_offload${kind:+_$kind}.json out=runs/demo ;;
  fsdp2) config=configs/fsdp2_offload${kind:+_$kind}.toml out=runs/demo-fsdp2 ;;
esac
int8=${weights#float32}
config=${CONFIG:-$config}
out=${OUT:-$out${kind:+-$kind}${CODEC:+-$CODEC}${int8:+-$int8}}

# DeepSpeed builds its ops with the ninja of this Python, also when no environment is activated.
export PATH="$("$python" -c 'import sysconfig; print(sysconfig.get_path("scripts"))'):$PATH"

gpus=0
if [[ ${DS_ACCELERATOR:-cuda} == cuda ]]; then
  gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
fi
# The second is for pure PyTorch.
((gpus > 0)) || export DS_ACCELERATOR=${DS_ACCELERATOR:-cpu} CUDA_VISIBLE_DEVICES=
ranks=${RANKS:-$((gpus > 0 ? gpus : 2))} # NCCL takes one per GPU
source launch/numa.sh "$python" "$ranks"
# Ranks share the cores.  nproc would take OMP_NUM_THREADS for their number.
threads=$(($(env -u OMP_NUM_THREADS nproc) / ranks))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}

# A signal must reach torchrun, which then ends its ranks: they are in sessions of their own.
trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT
trap 'exit 130' INT TERM HUP

# Trains with the optimizer $1 and passes the other arguments to the program.
train() {
  if [[ $engine == deepspeed ]]; then # compiles what ranks would wait for
    "$python" -m examples.gpt --build --optimizer "$1" --config "$config" \
      ${CODEC:+--codec "$CODEC"}
  fi
  "$python" -m torch.distributed.run --standalone --nproc-per-node "$ranks" \
    "${numa[@]}" -m examples.gpt --optimizer "$1" --config "$config" --model "${MODEL:-demo}" \
    --steps "${STEPS:-400}" --seed "${SEED:-0}" --out "$out" ${CODEC:+--codec "$CODEC"} \
    ${DATA:+--data "$DATA"} "${@:2}" &
  wait $!
}

# In this order, because our op compiles in a fifth of the time of DeepSpeed's.
train "$optimizer" ${int8:+--weights "$int8"}
train "$twin"

settings="ENGINE=$engine OPTIMIZER=$optimizer MODEL=${MODEL:-demo} STEPS=${STEPS:-400} RANKS=$ranks"
settings="$settings CONFIG=$config${CODEC:+ CODEC=$CODEC}${int8:+ WEIGHTS=$int8}"
settings="$settings${DATA:+ DATA=$DATA} SEED=${SEED:-0}"
"$python" -m examples.gpt --report "$settings launch/local.sh" --optimizer "$optimizer" --out "$out"
