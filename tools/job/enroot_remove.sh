#!/usr/bin/env bash
#
# Delete those of the named enroot containers that this node has; enroot alone stops at the first that it has not.
#
# Usage: tools/job/enroot_remove.sh NAME...

set -euo pipefail
shopt -s inherit_errexit

main() {
  local name status=0
  local -A here=()
  while read -r name; do here[${name:-none}]=1; done < <(enroot list)
  wait "$!"
  for name in "$@"; do
    if [[ -v here[${name}] ]]; then enroot remove --force "${name}" || status=$?; fi
  done
  return "${status}"
}

main "$@"
