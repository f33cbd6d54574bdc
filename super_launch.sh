#!/usr/bin/env bash
#
# Start one stage of the recipe: on a Slurm cluster, or with LAUNCHER=local on this machine.
#
# Usage: ./super_launch.sh [--dry-run] [--check] [--force] [STAGE] [KEY=VALUE ...]
#
#   STAGE        a stage of configs/stages.yaml (stage1.1 or rlvr1): fills the variables below that are not set
#   KEY=VALUE    configuration overrides, e.g. grpo.max_num_steps=10; ~KEY deletes a key
#   --dry-run    print the command that would be executed, and stop (also DRY_RUN=true)
#   --check      check the variables and the configuration, not whether files are there, and stop
#   --force      start in spite of findings that may be wrong about this cluster; a wrong configuration stays refused
#   --help       print this text
#
# Required environment: EXP_NAME CONFIG_PATH MODEL_PATH TRAIN_PATH VAL_PATH; on Slurm also CONTAINER
# SANDBOX_CONTAINER PERSISTENT_CACHE SLURM_PARTITION SLURM_ACCOUNT. All variables: tools/draft/contract.py.
# With a STAGE also: SCALE=prod|small|tiny, PLATFORM=h100|b200.
#
# Exit status: the driver's with LAUNCHER=local (75: stopped early and saved, start again to resume), else sbatch's;
# 2 when an input is wrong, before anything is started; a dry run then still prints the command, where there is one.

set -euo pipefail
shopt -s inherit_errexit

ROOT="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
readonly ROOT

# The header above is the help text: one copy to keep true.
usage() { sed -n '3,/^$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }

die() {
  printf 'super_launch.sh: %s\n' "$@" >&2
  exit 2
}

main() {
  local stage='' python="${PYTHON:-${ROOT}/.venv/bin/python}" status=0 between=' ' word
  local -a overrides=() options=() wrong=() words=()

  while (($#)); do
    case "$1" in
      -h | --help)
        usage
        return
        ;;
      -n | --dry-run) options+=(--dry-run) ;;
      --check | --force) options+=("$1") ;;
      -*) wrong+=("unknown option '$1' (see --help)") ;;
      *=* | '~'*) overrides+=("$1") ;;
      *)
        [[ -z ${stage} ]] || wrong+=("two stages given: '${stage}' and '$1'; overrides are KEY=VALUE")
        stage=${stage:-$1}
        ;;
    esac
    shift
  done
  ((${#wrong[@]} == 0)) || die "${wrong[@]}"
  [[ -x ${python} ]] || die "${python}: no such interpreter; run 'make setup', or set PYTHON"

  # Words cross from Python as NUL-separated argv: never split, never quoted again. The first says what to do.
  # `wait` collects the status that a process substitution would lose.
  # The modules are those of this checkout, whatever else the interpreter has.
  mapfile -d '' -t words < <(PYTHONPATH="${ROOT}${PYTHONPATH:+:${PYTHONPATH}}" \
    "${python}" -m tools.launch.command "${options[@]}" --stage "${stage}" -- "${overrides[@]}")
  wait "$!" || status=$?
  ((${#words[@]})) || return "${status}" # 0: --check found nothing wrong

  if [[ ${words[0]} == print ]]; then
    [[ ! -t 1 ]] || between=$' \\\n  ' # one word a line, for eyes
    printf '%q' "${words[1]}"
    for word in "${words[@]:2}"; do printf '%s%q' "${between}" "${word}"; done
    printf '\n'
    return "${status}"
  else
    exec "${words[@]:1}"
  fi
}

main "$@"
