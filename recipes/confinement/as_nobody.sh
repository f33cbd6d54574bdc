#!/usr/bin/env bash
#
# Run a command without root's rights on files that only root may reach.
#
# Usage: as_nobody.sh WORK SOURCE... -- COMMAND...
#
#   WORK     an empty directory; every SOURCE, a file or a directory, appears in it as 0, 1, 2, ...
#
# Started by root, the command runs as the user nobody, in a mount namespace that ends with it. Started by another user,
# it runs as that user, and the sources are links.

set -euo pipefail
shopt -s inherit_errexit

readonly NOBODY=65534

# Whether this is root with other users beside it: in an unprivileged container root is the only user.
is_root() {
  local first _ count
  ((EUID == 0)) || return 1
  while read -r first _ count; do
    if ((first <= NOBODY && NOBODY < first + count)); then return 0; fi
  done </proc/self/uid_map
  return 1
}

# Show every source in WORK.
show_sources() {
  local number
  for number in "${!sources[@]}"; do
    if [[ ${way} == link ]]; then
      ln -s -- "${sources[number]}" "${work}/${number}"
    elif [[ -d ${sources[number]} ]]; then
      mkdir -- "${work}/${number}"
      mount --bind -- "${sources[number]}" "${work}/${number}"
    else
      touch -- "${work}/${number}"
      mount --bind -- "${sources[number]}" "${work}/${number}"
    fi
  done
}

# On some machines only root may open /dev/fuse, though it gives nobody any rights; here everybody may.
open_fuse() {
  [[ -c /dev/fuse && $(stat --format=%A /dev/fuse) != *rw- ]] || return 0
  mknod --mode=666 -- "${work}/fuse" c 10 229
  mount --bind -- "${work}/fuse" /dev/fuse
}

main() {
  local way=link work
  local -a sources=()
  if [[ $1 == --mounted ]]; then
    way=mount
    shift
  elif is_root; then
    exec unshare --mount --propagation=private -- "${BASH_SOURCE[0]}" --mounted "$@"
  fi
  work=$1
  shift
  until [[ $1 == -- ]]; do
    sources+=("$1")
    shift
  done
  shift
  if [[ ${way} == link ]]; then
    show_sources
    exec "$@"
  fi
  mount -t tmpfs -o "mode=755,uid=${NOBODY},gid=${NOBODY}" tmpfs "${work}"
  show_sources
  open_fuse
  cd /
  exec setpriv "--reuid=${NOBODY}" "--regid=${NOBODY}" --clear-groups --no-new-privs -- "$@"
}

main "$@"
