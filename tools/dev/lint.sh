#!/usr/bin/env bash
#
# Run every linter over every file of its kind, and report all failures, not the first.
#
# Usage: tools/dev/lint.sh [--fix]
#
#   --fix   let ruff and shfmt correct what they can, then lint

set -euo pipefail
shopt -s inherit_errexit

ROOT="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)"
readonly ROOT
readonly BIN="${ROOT}/.venv/bin"
readonly -a SHFMT=("${BIN}/shfmt" -i 2 -ci)

# Everything that bash runs, found by name or by its first line, so that a new script cannot escape.
shell_files() {
  git ls-files -z --cached --others --exclude-standard | while IFS= read -r -d '' file; do
    [[ -f ${file} ]] || continue
    if [[ ${file} == *.sh || ${file} == *.sbatch ]] || [[ $(head -c 64 -- "${file}" | tr -d '\0' | head -n 1) =~ ^'#!'.*(bash|/sh) ]]; then
      printf '%s\0' "${file}"
    fi
  done
}

failed=()
check() {
  local name=$1
  shift
  if "$@"; then
    printf 'lint: %s: ok\n' "${name}"
  else
    failed+=("${name}")
  fi
}

main() {
  cd -- "${ROOT}"
  local -a scripts=() tests=()
  mapfile -d '' -t scripts < <(shell_files)
  wait "$!"
  ((${#scripts[@]})) || {
    printf 'lint: no shell script found; is this a git checkout?\n' >&2
    exit 1
  }
  if [[ ${1:-} == --fix ]]; then
    "${BIN}/ruff" check --fix-only --quiet .
    "${BIN}/ruff" format --quiet .
    "${SHFMT[@]}" -w "${scripts[@]}"
  fi
  check 'ruff check' "${BIN}/ruff" check --quiet .
  check 'ruff format' "${BIN}/ruff" format --check --quiet .
  mapfile -t tests < <(git ls-files --cached --others --exclude-standard 'tests/*.py')
  check 'mypy' "${BIN}/mypy" --no-error-summary
  check 'mypy (tests)' "${BIN}/mypy" --no-error-summary --config-file tests/mypy.ini "${tests[@]}"
  check "shellcheck (${#scripts[@]} files)" "${BIN}/shellcheck" --external-sources "${scripts[@]}"
  check 'shfmt' "${SHFMT[@]}" -d "${scripts[@]}"
  check 'hadolint' "${BIN}/hadolint" containers/*/Dockerfile
  check 'yamllint' "${BIN}/yamllint" --strict .
  check 'configs' "${BIN}/python" tools/dev/lint_overlays.py
  ((${#failed[@]} == 0)) || {
    printf 'lint: failed: %s\n' "${failed[*]}" >&2
    exit 1
  }
}

main "$@"
