#!/usr/bin/env bash
#
# Start the Ray head on this node and stay until it ends.
#
# Usage: tools/launch/ray_head.sh PYTHON UNITS

set -euo pipefail
shopt -s inherit_errexit

main() {
  local python=$1 units=$2
  local -a ports=()
  # Slurm's own variables would make libraries in the actors think that they are its tasks.
  unset "${!SLURM_@}" "${!PMI_@}" "${!PMIX_@}"
  mapfile -t ports < <("${python}" -m recipes.cluster.ports --head)
  wait "$!"
  exec "${python}" -m ray.scripts.scripts start --head --block --disable-usage-stats --include-dashboard=false \
    --num-gpus="${units}" --resources="{\"worker_units\": ${units}}" "${ports[@]}"
}

main "$@"
