#!/usr/bin/env bash
#
# Run a command in the mounted checkout, with the image's environment as its .venv: in this container only.

set -euo pipefail
shopt -s inherit_errexit

main() {
  cd /opt/recipe
  [[ -f Makefile ]] || {
    printf 'start.sh: /opt/recipe: got no checkout, expected one; mount it there\n' >&2
    exit 2
  }
  mkdir -p .venv
  mount --bind /opt/venv .venv || {
    printf 'start.sh: .venv: got no right to mount, expected --privileged; add it to podman run\n' >&2
    exit 2
  }
  exec "$@"
}

main "$@"
