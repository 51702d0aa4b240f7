#!/usr/bin/env bash
# The programs that tests start, as COMMAND:DEBIAN_PACKAGE. As root with apt the missing ones are installed;
# elsewhere they are named, and the tests that need them fail.
set -euo pipefail
tools=(curl:curl prometheus:prometheus "$@")

missing=()
for tool in "${tools[@]}"; do
  command -v "${tool%%:*}" >/dev/null || missing+=("${tool##*:}")
done
[ ${#missing[@]} -gt 0 ] || exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  echo "install: ${missing[*]} (apt, for the tests)"
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq
  apt-get install -qq --yes --no-install-recommends "${missing[@]}" >/dev/null
else
  echo "Missing for the tests: apt-get install ${missing[*]}" >&2
fi
