#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Train the same small GPT twice from the same seed on this machine, with one of configs/ (by default
# under ZeRO-2 with the optimizer offloaded to the host): once with one of zero8's optimizers, once
# with its fp32 twin: the AdamW, Lion or Muon of DeepSpeed, or the SGD of PyTorch, which under FSDP2 also
# has the AdamW. Then time steps of both over 2^25 parameters, with all cores, write OUT/summary.json and
# OUT/loss.png and print tables. Warnings of each rank are in OUT/*.log.
#
# usage: launch/local.sh [--dry-run | --help], with these environment variables (defaults in brackets):
# Relative paths count from the repository's root.
#   ENGINE  deepspeed, or fsdp2 for pure PyTorch [deepspeed; with WEIGHTS=int8 fsdp2]
#   OPTIMIZER  zero8's: Adam8bitBlockwise, SGD8bitBlockwise or, with deepspeed only, Lion8bitBlockwise
#           or Muon8bitBlockwise [Adam8bitBlockwise]
#   CODEC   of zero8's states: log, log6, dynamic, fp8 or linear4 [the config's, which is log]
#   WEIGHTS of the linear layers in the run of zero8's optimizer: float32, or int8 for torchao's
#           INT8 weights, with fsdp2 only; the fp32 run's are always float32 [float32]
#   STEPS   optimizer steps of each run [400]
#   RANKS   processes [2; with CUDA the number of GPUs]
#   CONFIG  config of the engine; the fp32 run replaces only its optimizer type
#           [configs/zero2_offload.json; with fsdp2 configs/fsdp2_offload.toml; with another optimizer
#           that file whose name also ends in _lion, _sgd or _muon]
#   MODEL   its size: demo (1.7 M parameters), 1b or 3b [demo]
#   DATA    text to train on, a file or folder [the Python standard library's own sources]
#   OUT     folder for the results [runs/demo; with fsdp2 runs/demo-fsdp2; with another optimizer
#           the name also ends in -lion, -sgd or -muon, with CODEC in its name, and with
#           WEIGHTS=int8 in -int8]
#   SEED    of initialization and batches [0]
#   PYTHON  interpreter [.venv/bin/python, else python3]
#   OMP_NUM_THREADS  threads of each rank [cores / RANKS, at least 1]
#   DS_ACCELERATOR   set to cpu to leave a GPU alone [cpu where there is no GPU]
set -euo pipefail

case ${1:-} in
  "") run= ;;
  --dry-run) run=echo ;; # print the commands
  --help)
    sed -n '/^# Train/,/^set/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit
    ;;
  *)
    echo "zero8: got $1, expected --dry-run or --help" >&2
    exit 2
    ;;
esac

cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-.venv/bin/python}
[[ -n ${PYTHON:-} || -x $python ]] || python=python3

case ${WEIGHTS:-float32} in
  float32) engine=deepspeed int8= ;;
  int8) engine=fsdp2 int8=int8 ;;
  *)
    echo "zero8: got WEIGHTS=$WEIGHTS, expected float32 or int8" >&2
    exit 1
    ;;
esac
engine=${ENGINE:-$engine}
optimizer=${OPTIMIZER:-Adam8bitBlockwise}
not_in_fsdp2= # why this one is not
case $optimizer in
  Adam8bitBlockwise) twin=AdamW ending= ;;
  Lion8bitBlockwise) twin=Lion ending=lion not_in_fsdp2="PyTorch has no Lion to compare with" ;;
  SGD8bitBlockwise) twin=SGD ending=sgd ;;
  Muon8bitBlockwise) twin=Muon ending=muon not_in_fsdp2="PyTorch's Muon steps matrices alone" ;;
  *)
    echo "zero8: got OPTIMIZER=$optimizer, expected Adam8bitBlockwise, Lion8bitBlockwise," \
      "SGD8bitBlockwise or Muon8bitBlockwise" >&2
    exit 1
    ;;
esac
case $engine in
  deepspeed) config=configs/zero2_offload${ending:+_$ending}.json out=runs/demo${ending:+-$ending} ;;
  fsdp2) config=configs/fsdp2_offload${ending:+_$ending}.toml out=runs/demo-fsdp2${ending:+-$ending} ;;
  *)
    echo "zero8: got ENGINE=$engine, expected deepspeed or fsdp2" >&2
    exit 1
    ;;
esac
if [[ $engine == deepspeed && -n $int8 ]]; then
  echo "zero8: got WEIGHTS=int8 with ENGINE=deepspeed, expected float32, as ZeRO flattens weights," \
    "and INT8 weights have a scale per row; run it with ENGINE=fsdp2" >&2
  exit 1
fi
if [[ $engine == fsdp2 && -n $not_in_fsdp2 ]]; then
  echo "zero8: got OPTIMIZER=$optimizer with ENGINE=fsdp2, expected Adam8bitBlockwise or" \
    "SGD8bitBlockwise, as $not_in_fsdp2; run it with ENGINE=deepspeed" >&2
  exit 1
fi
config=${CONFIG:-$config}
out=${OUT:-$out${CODEC:+-$CODEC}${int8:+-$int8}}

# DeepSpeed builds its ops with the ninja of this Python, also when no environment is activated.
export PATH="$("$python" -c 'import sysconfig; print(sysconfig.get_path("scripts"))'):$PATH"

gpus=0
if [[ ${DS_ACCELERATOR:-cuda} == cuda ]]; then
  gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
fi
# The second is for pure PyTorch.
((gpus > 0)) || export DS_ACCELERATOR=${DS_ACCELERATOR:-cpu} CUDA_VISIBLE_DEVICES=

# NCCL takes one rank per GPU.
ranks=${RANKS:-$((gpus > 0 ? gpus : 2))}
model=${MODEL:-demo}
steps=${STEPS:-400}
seed=${SEED:-0}

# Ranks share the cores; more threads than cores make every rank wait.
# nproc would take OMP_NUM_THREADS for the number of cores.
cores=$(env -u OMP_NUM_THREADS nproc)
threads=$((cores / ranks))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}

# A signal must reach torchrun, which then ends its ranks: they are in sessions of their own.
child=
stop() {
  trap - INT TERM HUP
  if [[ -n $child ]]; then
    kill -TERM "$child" 2>/dev/null || true
    wait "$child" || true
  fi
  exit 130
}
trap stop INT TERM HUP

# Trains with the optimizer $1 and passes the other arguments to the program.
# What DeepSpeed needs and was not compiled before is compiled first.
train() {
  if [[ $engine == deepspeed ]]; then
    $run "$python" -m examples.gpt.build "$config" "$1" ${CODEC:+--codec "$CODEC"}
  fi
  $run "$python" -m torch.distributed.run --standalone --nproc-per-node "$ranks" -m examples.gpt \
    --engine "$engine" --optimizer "$1" --config "$config" --model "$model" --steps "$steps" \
    --seed "$seed" --out "$out" ${CODEC:+--codec "$CODEC"} \
    ${DATA:+--data "$DATA"} "${@:2}" &
  child=$!
  wait "$child"
}

# In this order, because our op compiles in a fifth of the time of DeepSpeed's.
train "$optimizer" ${int8:+--weights "$int8"}
train "$twin"

echo "timing steps over 2^25 parameters"
settings="ENGINE=$engine OPTIMIZER=$optimizer MODEL=$model STEPS=$steps RANKS=$ranks"
settings="$settings CONFIG=$config${CODEC:+ CODEC=$CODEC}${int8:+ WEIGHTS=$int8}"
settings="$settings${DATA:+ DATA=$DATA} SEED=$seed"
OMP_NUM_THREADS=$cores $run "$python" -m examples.gpt.report "$out" --optimizer "$optimizer" \
  --command "$settings launch/local.sh"
