#!/usr/bin/env bash
#
# Join the Ray cluster of the head node and stay until it ends.
#
# Usage: tools/launch/ray_worker.sh PYTHON UNITS HEAD

set -euo pipefail
shopt -s inherit_errexit

readonly HEAD_SECONDS=600

main() {
  local python=$1 units=$2 head=$3
  local -a ports=()
  unset "${!SLURM_@}" "${!PMI_@}" "${!PMIX_@}"
  # The first flag is the address of the head.
  mapfile -t ports < <("${python}" -m recipes.cluster.ports --worker "${head}")
  wait "$!"
  local address=${ports[0]#--address=}
  until (: <"/dev/tcp/${address/://}") 2>/dev/null; do
    if ((SECONDS >= HEAD_SECONDS)); then
      printf 'ray_worker.sh: the head does not answer at %s after %s s\n' "${address}" "${HEAD_SECONDS}" >&2
      exit 1
    fi
    sleep 1
  done
  exec "${python}" -m ray.scripts.scripts start --block --disable-usage-stats \
    --num-gpus="${units}" --resources="{\"worker_units\": ${units}}" "${ports[@]}"
}

main "$@"
