#!/usr/bin/env bash
#
# Run Ray on this node until the job ends it with USR2; see tools/job/node.py.
#
# Usage: tools/job/ray_node.sh PYTHON OPTIONS...

set -euo pipefail
shopt -s inherit_errexit

# `scancel --signal=USR1` reaches every process of every step, and is meant for the driver alone. What is ignored here
# stays ignored in all that Ray starts.
trap '' USR1
exec "$1" -m tools.job.node "${@:2}"
