#!/usr/bin/env bash
# Builds a virtual environment from the pinned lists, or leaves it alone when it is what the lists say.
#
#   deploy/venv.sh FOLDER [LIST]    LIST is a file of deploy/requirements without .txt: cpu, cuda, cpu-0.28.0 ...;
#                                   left out, cuda where an NVIDIA GPU answers, else cpu
#
# Environment: DEVICE=cpu|cuda stands for LIST, PYTHON names the interpreter, GATEWAY_TORCH_INDEX a package index
# that has PyTorch's CPU build.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

gpus() { [[ $(nvidia-smi -L 2>/dev/null) == GPU* ]]; }
version() { "$1" -c 'import sys; print(sys.version_info[:2])' 2>/dev/null; }

venv=$1
list=${2:-${DEVICE:-$(gpus && echo cuda || echo cpu)}}
lists=("deploy/requirements/$list.txt" deploy/requirements/model.txt deploy/requirements/test.txt)
if [ ! -f "${lists[0]}" ]; then
  echo "install: there is no ${lists[0]}; deploy/requirements/lock.sh ${list#cpu-} makes one" >&2
  exit 1
fi
log=$venv/install.log
# The path is part of the key because a virtual environment does not survive a move.
packages_key="$list $PWD $(cat "${lists[@]}" | sha256sum)"
project_key=$(sha256sum <pyproject.toml)

holds() { # FILE KEY
  [ -f "$venv/$1" ] && [ "$(cat "$venv/$1")" = "$2" ]
}
python_stands() {
  local now
  now=$(version "$venv/bin/python") && { [ -z "${PYTHON-}" ] || [ "$now" = "$(version "$PYTHON")" ]; }
}

pip() { "$venv/bin/python" -m pip "$@"; }
pinned() { sed -n "s/^\($1==[^ ;]*\).*/\1/p" "${lists[@]}"; }

show() { # pip's lines one over the other on a terminal; elsewhere the stages' own lines are enough
  local line
  if [ ! -t 1 ]; then cat >/dev/null; return; fi
  while IFS= read -r line; do printf '\r\033[K  %.76s' "$line"; done
  printf '\r\033[K'
}
stage() { # TEXT COMMAND...
  local text=$1
  shift
  echo "install: $text"
  if ! "$@" 2>&1 | tee -a "$log" | show; then
    tail -n 20 "$log" >&2
    echo "install: failed at '$text'; all of it is in $log" >&2
    exit 1
  fi
}

torch() {
  local torch
  torch=$(pinned torch)
  if [ -n "${GATEWAY_TORCH_INDEX-}" ]; then
    pip install --no-deps --index-url "$GATEWAY_TORCH_INDEX" "$torch"
  else
    # Elsewhere than on a CPU index this may be the CUDA build, which does not load without its dependencies.
    pip install --constraint "${lists[0]}" "$torch"
  fi
}

trap 'exit 130' INT # without it an interrupted stage would be reported as a failed one
# One build at a time for a clone; the second one then finds it done.
exec 9<deploy
flock 9
if ! holds .packages "$packages_key" || ! python_stands; then
  python=$(deploy/check.sh)
  started=$SECONDS
  rm -rf "$venv"
  mkdir "$venv"
  stage "$venv for $list, with $("$python" -V)" "$python" -m venv "$venv"
  stage "pip" pip install pip==26.3
  if [ "$list" != cuda ]; then
    stage "$(pinned torch)${GATEWAY_TORCH_INDEX:+ (CPU build)}" torch
  fi
  stage "$(pinned 'vllm[a-z-]*') and what it needs, $(cat "${lists[@]}" | grep == | sort -u | wc -l) packages" \
    pip install --no-deps "${lists[@]/#/--requirement=}"
  echo "$packages_key" >"$venv/.packages" # last, so an interrupted build does not count
  echo "install: done in $((SECONDS - started)) s"
fi
if ! holds .project "$project_key"; then
  stage "the gateway" pip install --no-deps --no-build-isolation --editable .
  echo "$project_key" >"$venv/.project"
fi
