# shellcheck shell=bash
#
# The packages of the environment: installed from lines of the lock, which hold the hash of every file. uv installs what
# has a wheel, in a fraction of the time; where uv cannot, pip does, whose words say what is wrong. To be sourced by
# setup.sh, which has VENV, LOCK, LOG, CHECK, TORCH_INDEX, `say` and `die`.
#
#   pip_install WHAT OPTIONS    run pip; on failure say why and end
#   install_packages            install what is missing, broken or of another version: everything on the first run

run_pip() {
  "${VENV}/bin/python" -m pip install --disable-pip-version-check --no-input --no-deps "$@" >>"${LOG}" 2>&1
}

pip_install() {
  local what=$1
  shift
  run_pip "$@" || die "${what}: $(explain)"
}

# Install lines of the lock, whose hashes pip checks: FILE WHAT LINES -- PIP_OPTIONS. The file keeps the lines for pip.
install_lines() {
  local file="${VENV}/$1" what=$2
  local -a lines=()
  shift 2
  until [[ $1 == -- ]]; do
    lines+=("$1")
    shift
  done
  shift
  ((${#lines[@]})) || return 0
  say "installing ${what}"
  printf '%s\n' "${lines[@]}" >"${file}"
  pip_install "${what}" --force-reinstall --require-hashes --requirement "${file}" "$@"
}

# What pip is configured with: the environment first, then its files.
pip_setting() { "${VENV}/bin/python" -m pip config list | sed -n "s/^[a-z:]*\\.$1='\\(.*\\)'\$/\\1/p" | head -n 1; }

# Let uv install lines of the lock from where pip would take them; fails where pip has to.
uv_install() {
  local uv="${VENV}/bin/uv" setting
  local -a words=(--no-config --python "${VENV}/bin/python" --no-deps --reinstall --require-hashes --only-binary ":all:" --compile-bytecode --index-strategy unsafe-best-match)
  setting="$(pip_setting index-url)"
  [[ -z ${setting} ]] || words+=(--default-index "${setting}")
  # The index of torch has other packages of the same names; each package still has to have the hash of the lock.
  for setting in $(pip_setting extra-index-url); do words+=(--index "${setting}"); done
  for setting in $(pip_setting find-links); do words+=(--find-links "${setting}"); done
  [[ -z $(pip_setting no-index) ]] || words+=(--no-index)
  setting="$(pip_setting cert)"
  printf '%s\n' "$@" >"${VENV}/uv.txt"
  SSL_CERT_FILE="${setting:-${SSL_CERT_FILE:-}}" UV_HTTP_RETRIES=1 \
    "${uv}" pip install "${words[@]}" --requirement "${VENV}/uv.txt" >>"${LOG}" 2>&1
}

explain() {
  local recent reason
  recent="$(tail -n 60 -- "${LOG}")"
  if grep -q -i -E 'No space left|Errno 28|Disk quota' <<<"${recent}"; then
    printf 'the disk is full; free some or set VENV to another disk (log: %s)' "${LOG}"
  elif grep -q -i -E 'NewConnectionError|Max retries exceeded|name resolution|Network is unreachable|Connection (refused|reset)|timed out|ProxyError|SSLError' <<<"${recent}"; then
    printf 'no network: the package index could not be reached; check the connection, the proxy and "pip config list" (log: %s)' "${LOG}"
  elif grep -q -E 'DO NOT MATCH THE HASHES|Hashes are required' <<<"${recent}"; then
    printf 'a package has another hash than the lock, so it was changed on its way; check the index (log: %s)' "${LOG}"
  else
    reason="$(grep -m 1 -i 'fatal error:' <<<"${recent}" || grep -i '^error' <<<"${recent}" | tail -n 1)" || reason='for a new reason'
    printf 'pip failed: %s (log: %s)' "${reason}" "${LOG}"
  fi
}

# The CPU build of torch is not in the common index; its hash is the same wherever it comes from.
install_torch() {
  say "installing ${1%% *}"
  printf '%s\n' "$1" >"${VENV}/torch.txt"
  if ! run_pip --force-reinstall --require-hashes --retries 1 --requirement "${VENV}/torch.txt"; then
    say "the configured index has no ${1%% *}; trying ${TORCH_INDEX}"
    pip_install "${1%% *}" --force-reinstall --require-hashes --index-url "${TORCH_INDEX}" --requirement "${VENV}/torch.txt"
  fi
}

install_packages() {
  local -a missing=() wheels=() sources=()
  local line
  # A killed installation can leave metadata without its file list, which pip can neither use nor remove.
  find "${VENV}/lib" -maxdepth 3 -name '*.dist-info' ! -exec test -e '{}/RECORD' ';' -exec rm -r -- '{}' + -prune
  mapfile -t missing < <("${VENV}/bin/python" -I "${CHECK}" "${LOCK}")
  wait "$!" || die "${CHECK} failed; delete ${VENV} and run again"
  for line in "${missing[@]}"; do
    [[ ${line} != uv==* ]] || install_lines tool.txt uv "${line}" -- --only-binary :all:
  done
  for line in "${missing[@]}"; do
    case "${line}" in
      uv==*) ;;
      torch==*) install_torch "${line}" ;;
      *'# source') sources+=("${line}") ;;
      *) wheels+=("${line}") ;;
    esac
  done
  if ((${#wheels[@]})) && [[ -x ${VENV}/bin/uv ]]; then
    say "installing ${#wheels[@]} packages with uv"
    uv_install "${wheels[@]}" && wheels=()
  fi
  install_lines wheels.txt "${#wheels[@]} packages" "${wheels[@]}" -- --only-binary :all:
  # Built with the setuptools of the lock: in an isolated build pip would download any version of it.
  # --use-pep517: an old pip would otherwise install them in a way that leaves no list of files to check.
  install_lines sources.txt "${#sources[@]} packages from source" "${sources[@]}" -- --no-build-isolation --use-pep517
}
