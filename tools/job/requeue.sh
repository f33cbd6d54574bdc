# shellcheck shell=bash
#
# How a job ends: with the driver's status, or back in the queue under the same id, so that what depends on it
# (afterok) still does. To be sourced by the job file, which has `say`.
#
#   ask_driver SIGNAL         ask the driver to save and stop
#   newest_checkpoint DIR     print what DIR/latest names, nothing when there is none
#   down_nodes LIST           print what Slurm says of the nodes of LIST that it cannot use
#   resume_or_end STATUS SAVED_BEFORE SAVED_NOW MAX_RESTARTS NODE...
#                             requeue after a save (75), an interruption before the first one, or the loss of a node;
#                             returns the status to end with

readonly EXIT_RESUME=75 PROBE_SECONDS=5 DOWN_MARGIN_SECONDS=60
# A controller that restarts is away for a minute.
readonly REQUEUE_TRIES=8 REQUEUE_SECONDS="${REQUEUE_SECONDS:-15}"
readonly LIMIT_SECONDS=720 # before the end of a job Slurm signals it, up to a minute early: see walltime.py

# srun takes TERM as an order to kill its step, but forwards USR1.
ask_driver() {
  say "got $1: the driver is asked to save and stop"
  # shellcheck disable=SC2154 # driver_pid is the job file's
  kill -USR1 "${driver_pid}" 2>/dev/null || true
  down_nodes "${SLURM_JOB_NODELIST}"
}

# An engine that makes no link has its checkpoints in step_N.
newest_checkpoint() {
  readlink -- "$1/latest" ||
    find "$1" -maxdepth 1 -name 'step_[0-9]*' -printf '%f\n' 2>/dev/null | sort --version-sort | tail -n 1 ||
    true
}

down_nodes() {
  timeout 10 sinfo --noheader --Node --nodes="$1" --states=down,drain,fail,no_respond --format='%N is %T: %E' || true
}

# Print a number of the controller's configuration: setting NAME DEFAULT.
setting() {
  local text
  text="$(timeout 10 scontrol show config | sed -n "s/^$1 *= *\([0-9][0-9]*\).*/\1/p")" || true
  printf '%s' "${text:-$2}"
}

# Print the nodes on which no slurmd answers: switched off, cut off, or crashed.
silent_nodes() {
  local node port seconds
  local -A probes=()
  port="$(setting SlurmdPort 6818)"
  for node in "$@"; do
    (: <"/dev/tcp/${node}/${port}") 2>/dev/null &
    probes[${node}]=$!
  done
  for ((seconds = 0; seconds < PROBE_SECONDS; seconds++)); do
    [[ -z $(jobs -rp) ]] || sleep 1
  done
  for node in "$@"; do
    kill -TERM "${probes[${node}]}" 2>/dev/null || true # the kernel itself would try for minutes
    wait "${probes[${node}]}" || printf '%s\n' "${node}"
  done
}

# What NeMo RL says before it ends with status 0 because of checkpointing.checkpoint_must_save_by.
readonly STOPPED_EARLY='Timeout has been reached, stopping training early'

# Whether the driver stopped though its time was not up: a user or a preemption wanted the nodes.
was_interrupted() {
  # shellcheck disable=SC2154 # log_dir is the job file's
  ! grep -qs 'stopping early: checkpointing.checkpoint_must_save_by' "${log_dir}/driver.log" &&
    ((EPOCHSECONDS + LIMIT_SECONDS < ${SLURM_JOB_END_TIME:-EPOCHSECONDS + 2 * LIMIT_SECONDS}))
}

resume_or_end() {
  local status=$1 before=$2 now=$3 most=$4 restarts=${SLURM_RESTART_COUNT:-0} saved="saved $3" node seconds
  local -a silent=()
  shift 4
  if ((status == 0)) && grep -qs "${STOPPED_EARLY}" "${log_dir}/driver.log"; then status=${EXIT_RESUME}; fi
  case "${status}" in
    0 | 2) return "${status}" ;; # done; or an input is wrong, and the same start would end the same way
    "${EXIT_RESUME}")
      if [[ -z ${now} || ${now} == "${before}" ]]; then saved=''; fi
      if [[ -z ${saved} ]] && ! was_interrupted; then
        say "not restarted: this start saved no new checkpoint (newest: ${now:-none}), and the next one would not either"
      elif ((restarts >= most)); then
        say "not restarted: this was restart ${restarts} of at most ${most} (MAX_RESTARTS); submit again to go on"
      else
        requeue "${saved:-interrupted before its first save}, restart $((restarts + 1)) of at most ${most}"
      fi
      return "${status}"
      ;;
  esac
  mapfile -t silent < <(silent_nodes "$@")
  wait "$!"
  ((${#silent[@]})) || return "${status}"
  for node in "${silent[@]}"; do say "node ${node} is lost: no slurmd answers there"; done
  if ((restarts >= most)); then
    say "not restarted: this was restart ${restarts} of at most ${most} (MAX_RESTARTS); submit again to go on"
    return "${status}"
  fi
  # Put back before Slurm has noticed, the job could get the same node again. Slurm requeues it when it has.
  seconds=$(($(setting SlurmdTimeout 300) + DOWN_MARGIN_SECONDS))
  say "waiting at most ${seconds} s for Slurm to notice, too, and to requeue the job"
  trap 'say "Slurm ends this start"; exit "${status}"' TERM
  sleep "${seconds}" >/dev/null 2>&1 &
  wait "$!"
  say 'Slurm has not requeued the job; submit again to go on'
  return "${status}"
}

requeue() {
  local state tries
  for ((tries = 0; tries < REQUEUE_TRIES; tries++)); do
    ((tries == 0)) || sleep "${REQUEUE_SECONDS}"
    # A job that was cancelled meanwhile stays cancelled: Slurm would requeue that one, too.
    state="$(timeout 30 scontrol show job --oneliner "${SLURM_JOB_ID}" | grep -o 'JobState=[A-Z_]*')" || continue
    if [[ ${state} != JobState=RUNNING ]]; then
      say "not restarted: the job's state is ${state#JobState=}"
      return
    fi
    # Slurm may send this job its TERM before scontrol has its answer.
    if timeout 60 bash -c "trap '' TERM && exec scontrol requeue ${SLURM_JOB_ID}"; then
      say "requeued: $1"
      return
    fi
  done
  say 'not restarted: Slurm did not take the requeue; submit again to go on'
}
