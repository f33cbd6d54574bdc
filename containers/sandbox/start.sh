#!/usr/bin/env bash
#
# Serve the sandbox. In the image its name is /start-with-nginx.sh, which launchers of the published recipe start. Without
# containers, SANDBOX_COMMAND=.../containers/sandbox/start.sh serves it by the Python and bubblewrap of the node.

set -euo pipefail
shopt -s inherit_errexit

home="$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")"
# The server imports recipes/confinement: beside it in the image, two folders above it in a checkout.
PYTHONPATH="${home}/../.." exec python3 "${home}/server.py"
