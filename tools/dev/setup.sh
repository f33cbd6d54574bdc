#!/usr/bin/env bash
#
# Build the CPU environment from the lock file, or repair what a killed run left behind.
#
# Usage: tools/dev/setup.sh [--help]
#
#   VENV          where to build it (default .venv)
#   LOCK          pinned packages with their hashes (default containers/requirements-cpu.lock)
#   PYTHON        interpreter to build it with (default python3.11)
#   MIN_FREE_GB   disk space that must be free before packages are installed (default 6)
#   TORCH_INDEX   where the CPU build of torch is, when the configured index has none
#
# Exit status: 0 built or nothing to do, 2 the machine cannot build it (the message says why).

set -euo pipefail
shopt -s inherit_errexit

ROOT="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)"
readonly ROOT
readonly VENV="${VENV:-${ROOT}/.venv}"
readonly LOCK="${LOCK:-${ROOT}/containers/requirements-cpu.lock}"
readonly PYTHON="${PYTHON:-python3.11}"
readonly MIN_FREE_GB="${MIN_FREE_GB:-6}"
readonly TORCH_INDEX="${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}"
readonly LOG="${VENV}/setup.log"
readonly CHECK="${ROOT}/tools/dev/check_env.py"
readonly LOCK_TIMED_OUT=1 # of flock; another status says that it cannot lock there, as on Lustre without -o flock

usage() { sed -n '3,/^$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }

say() { printf 'setup: %s\n' "$1"; }

die() {
  printf 'setup: %s\n' "$1" >&2
  exit 2
}

require_python() {
  local version include
  version="$("${PYTHON}" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" || version='none'
  [[ ${version} == 3.11 ]] || die "${PYTHON}: got Python ${version}, expected 3.11; install python3.11 or set PYTHON=/path/to/python3.11"
  "${PYTHON}" -c 'import ensurepip, venv' 2>/dev/null ||
    die "${PYTHON}: it has no venv module; install the package python3.11-venv"
  # The index has only the source of a few packages.
  command -v gcc >/dev/null || die 'gcc: not on PATH, but a few packages are compiled; install gcc'
  include="$("${PYTHON}" -c 'import sysconfig; print(sysconfig.get_path("include"))')"
  [[ -f ${include}/Python.h ]] || die "${PYTHON}: ${include}/Python.h is missing; install python3.11-dev"
}

require_disk() {
  local parent=${VENV} free_kb
  while [[ ! -d ${parent} ]]; do parent="$(dirname -- "${parent}")"; done
  free_kb="$(df --output=avail -k -- "${parent}" | tail -n 1)"
  ((free_kb >= MIN_FREE_GB * 1048576)) ||
    die "${parent}: got $((free_kb / 1048576)) GB free, expected ${MIN_FREE_GB}; free some disk or set VENV to another disk"
}

require_cpu_lock() {
  [[ -r ${LOCK} ]] || die "${LOCK}: there is no such file to read; set LOCK or restore it from git"
  local cuda
  cuda="$(grep -n -i -E '^(nvidia-|triton|cuda-|pytorch-triton|torchvision|torchaudio|torchcodec)' "${LOCK}" | tr '\n' ' ')" || true
  [[ -z ${cuda} ]] || die "${LOCK}: this lock is for the CPU, but has CUDA packages (${cuda% }); delete those lines"
}

# Two set-ups at once would install over each other. Children inherit the lock on purpose. Its owner alone may open the
# file: whoever may read a file may lock it.
lock_environment() {
  local file="${VENV%/}.lock" status=0
  mkdir -p -- "$(dirname -- "${file}")"
  if ! (umask 077 && : >>"${file}"); then
    die "${file}: it cannot be written; delete it or set VENV to a directory of your own"
  fi
  exec 9>>"${file}"
  flock --timeout 900 9 || status=$?
  ((status != LOCK_TIMED_OUT)) || die "${file}: another set-up has held this lock for 15 minutes; end it and run again"
  ((status == 0)) || say "${file}: this file system has no locks; start no second set-up of ${VENV}"
}

# pip writes the commands that pyproject.toml declares when it installs this package, and only then.
has_commands() {
  local name
  while read -r name; do
    [[ -x ${VENV}/bin/${name} ]] || return 1
  done < <(sed -n '/^\[project\.scripts\]/,/^\[/s/^\([a-z_-]*\) = .*/\1/p' "${ROOT}/pyproject.toml")
}

install_this_package() {
  pip_install 'this package' --no-deps --no-build-isolation --use-pep517 --editable "${ROOT}"
}

# shellcheck source=tools/dev/packages.sh
source "${ROOT}/tools/dev/packages.sh"

main() {
  case "${1:-}" in
    -h | --help)
      usage
      return
      ;;
    '') ;;
    *) die "unknown argument '$1' (see --help)" ;;
  esac
  require_cpu_lock
  local digest
  digest="$(sha256sum -- "${LOCK}" | awk '{ print $1 }')"
  if [[ -f ${VENV}/.synced && $(<"${VENV}/.synced") == "${digest}" ]]; then
    if ! has_commands; then # made before there were these
      lock_environment
      say 'installing the commands of this package'
      install_this_package
    fi
    touch -- "${VENV}/.synced"
    return
  fi

  require_python
  require_disk
  lock_environment
  if ! "${VENV}/bin/python" -m pip --version >/dev/null 2>&1; then
    say "creating ${VENV}"
    "${PYTHON}" -m venv --clear -- "${VENV}" || die "${VENV}: ${PYTHON} could not create it; see the message above"
  fi
  : >"${LOG}"
  install_packages
  if [[ $("${VENV}/bin/python" -I -c 'import recipes; print(recipes.__file__)' 2>/dev/null) != "${ROOT}/recipes/__init__.py" ]] ||
    ! has_commands; then
    install_this_package
  fi
  "${VENV}/bin/python" -I "${CHECK}" --final "${LOCK}" || die "${VENV}: the environment is wrong (see above); delete it and run again"
  printf '%s' "${digest}" >"${VENV}/.synced.new"
  mv -- "${VENV}/.synced.new" "${VENV}/.synced"
  say "ready: ${VENV}"
}

main "$@"
