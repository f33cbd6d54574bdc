#!/usr/bin/env bash
#
# Run a command in the mounted checkout, with the environment of the image as its .venv, in this container only.

set -euo pipefail
shopt -s inherit_errexit

main() {
  cd /opt/recipe
  [[ -f Makefile ]] || {
    printf 'start.sh: /opt/recipe: no checkout is mounted there; mount yours with -v\n' >&2
    exit 2
  }
  mkdir -p .venv
  mount --bind /opt/venv .venv || {
    printf 'start.sh: .venv: it cannot be mounted; add --privileged to podman run\n' >&2
    exit 2
  }
  exec "$@"
}

main "$@"
