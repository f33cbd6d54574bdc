#!/usr/bin/env bash
#
# Build the CPU environment from the lock file, or repair what a killed run left behind.
#
# Usage: tools/setup/setup.sh [--help]
#
#   VENV          where to build it (default .venv)
#   LOCK          pinned packages (default containers/requirements-cpu.lock)
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
readonly CHECK="${ROOT}/tools/setup/check_env.py"

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
    die "${PYTHON}: got no venv module, expected a full Python; install the package python3.11-venv"
  # A few packages of the lock exist as source only.
  command -v gcc >/dev/null || die 'gcc: got no such program, expected a C compiler; install gcc'
  include="$("${PYTHON}" -c 'import sysconfig; print(sysconfig.get_path("include"))')"
  [[ -f ${include}/Python.h ]] || die "${PYTHON}: got no ${include}/Python.h, expected it; install python3.11-dev"
}

require_disk() {
  local parent=${VENV} free_kb
  while [[ ! -d ${parent} ]]; do parent="$(dirname -- "${parent}")"; done
  free_kb="$(df --output=avail -k -- "${parent}" | tail -n 1)"
  ((free_kb >= MIN_FREE_GB * 1048576)) ||
    die "${parent}: got $((free_kb / 1048576)) GB free, expected ${MIN_FREE_GB}; free some disk or set VENV to another disk"
}

require_cpu_lock() {
  [[ -r ${LOCK} ]] || die "${LOCK}: got no such file, expected the lock of pinned packages; set LOCK or restore it from git"
  local cuda
  cuda="$(grep -n -i -E '^(nvidia-|triton|cuda-|pytorch-triton|torchvision|torchaudio|torchcodec)' "${LOCK}" | tr '\n' ' ')" || true
  [[ -z ${cuda} ]] || die "${LOCK}: got CUDA packages (${cuda% }), expected none: this lock is for the CPU; delete those lines"
}

# Run pip; on failure say which of the usual causes it was and end.
pip_install() {
  local what=$1
  shift
  # --use-pep517: an old pip would otherwise install sources in a way that leaves no list of files to check.
  if ! "${VENV}/bin/python" -m pip install --disable-pip-version-check --no-input --no-deps --use-pep517 "$@" >>"${LOG}" 2>&1; then
    die "${what}: $(explain)"
  fi
}

explain() {
  local recent reason
  recent="$(tail -n 60 -- "${LOG}")"
  if grep -q -i -E 'No space left|Errno 28|Disk quota' <<<"${recent}"; then
    printf 'the disk is full; free some or set VENV to another disk (log: %s)' "${LOG}"
  elif grep -q -i -E 'NewConnectionError|Max retries exceeded|name resolution|Network is unreachable|Connection (refused|reset)|timed out|ProxyError|SSLError' <<<"${recent}"; then
    printf 'no network: the package index could not be reached; check the connection, the proxy and "pip config list" (log: %s)' "${LOG}"
  else
    reason="$(grep -m 1 -i 'fatal error:' <<<"${recent}" || grep -i '^error' <<<"${recent}" | tail -n 1)" || reason='for a new reason'
    printf 'pip failed: %s (log: %s)' "${reason}" "${LOG}"
  fi
}

install_torch() {
  local pin=$1 cpu_pin="$1+cpu"
  say "installing ${cpu_pin}"
  if ! "${VENV}/bin/python" -m pip install --disable-pip-version-check --no-input --no-deps --force-reinstall \
    --retries 1 "${cpu_pin}" >>"${LOG}" 2>&1; then
    say "the configured index has no ${cpu_pin}; trying ${TORCH_INDEX}"
    pip_install "${pin}" --force-reinstall --index-url "${TORCH_INDEX}" "${cpu_pin}"
  fi
}

# Install what is missing, broken or of another version: everything on the first run.
install_packages() {
  local -a missing=() rest=()
  local pin
  # A killed installation can leave metadata without its file list, which pip can neither use nor remove.
  find "${VENV}/lib" -maxdepth 3 -name '*.dist-info' ! -exec test -e '{}/RECORD' ';' -exec rm -r -- '{}' + -prune
  mapfile -t missing < <("${VENV}/bin/python" -I "${CHECK}" "${LOCK}")
  wait "$!" || die "${CHECK} failed; delete ${VENV} and run again"
  for pin in "${missing[@]}"; do
    if [[ ${pin} == torch==* ]]; then install_torch "${pin}"; else rest+=("${pin}"); fi
  done
  if ((${#rest[@]})); then
    say "installing ${#rest[@]} packages"
    pip_install "${#rest[@]} packages, first ${rest[0]}" --force-reinstall "${rest[@]}"
  fi
}

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
    touch -- "${VENV}/.synced"
    return
  fi

  require_python
  require_disk
  # Two set-ups at once would install over each other. Children inherit the lock on purpose.
  exec 9<"${ROOT}/tools/setup"
  flock --timeout 900 9 || die 'another set-up has been running for 15 minutes; end it and run again'
  if ! "${VENV}/bin/python" -m pip --version >/dev/null 2>&1; then
    say "creating ${VENV}"
    "${PYTHON}" -m venv --clear -- "${VENV}" || die "${VENV}: ${PYTHON} could not create it; see the message above"
  fi
  : >"${LOG}"
  install_packages
  [[ $("${VENV}/bin/python" -I -c 'import recipes; print(recipes.__file__)' 2>/dev/null) == "${ROOT}/recipes/__init__.py" ]] ||
    pip_install 'this package' --no-build-isolation --editable "${ROOT}"
  "${VENV}/bin/python" -I "${CHECK}" --final "${LOCK}" || die "${VENV}: the environment is wrong (see above); delete it and run again"
  printf '%s' "${digest}" >"${VENV}/.synced.new"
  mv -- "${VENV}/.synced.new" "${VENV}/.synced"
  say "ready: ${VENV}"
}

main "$@"
