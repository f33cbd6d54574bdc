# shellcheck shell=bash
#
# How a job ends: with the driver's status, or back in the queue under the same id, so that the jobs that depend on it
# (afterok) still wait for it. The job file sources this and nodes.sh; it provides `say`, `log_dir`, `driver_pid` and
# `asked`.
#
#   ask_driver SIGNAL         ask the driver to save and stop; before there is one, note it in `asked`
#   newest_checkpoint DIR     print what DIR/latest names, nothing when there is none
#   resume_or_end STATUS SAVED_BEFORE SAVED_NOW MAX_RESTARTS NODE...
#                             put the job back into the queue when another start can go on; return the status to end with
#
# After which end a job starts again, at most MAX_RESTARTS times:
#   75, with a new checkpoint       the driver saved and stopped: a signal, or the time limit
#   75, without one                 only when it was interrupted before its time was up
#   another error, new checkpoint   a rank or the last engine failed: without the node that the message names
#   another error, preempted        Slurm has told the programs of all steps to end, Ray's too, before they could save
#   69, or a step before the driver without the nodes that the failure names, also without a checkpoint
#   a node that does not answer     Slurm puts the job back when it has noticed; when it has not, this does
# After 0 the run is done; after 2 an input is wrong, and the next start would end in the same way, on any node.

readonly EXIT_RESUME=75 DOWN_MARGIN_SECONDS="${DOWN_MARGIN_SECONDS:-60}"
readonly REQUEUE_TRIES=8 REQUEUE_SECONDS="${REQUEUE_SECONDS:-15}" # a controller that restarts is away for a minute

# srun takes TERM as an order to kill its step, but forwards USR1.
ask_driver() {
  # shellcheck disable=SC2034,SC2154 # both are the job file's
  if [[ -z ${driver_pid} ]]; then asked=$1 && return; fi
  say "got $1: the driver is asked to save and stop"
  kill -USR1 "${driver_pid}" 2>/dev/null || true
  down_nodes "${SLURM_JOB_NODELIST}"
}

# An engine that makes no link has its checkpoints in step_N; other names beside them, such as step_5.bak, are not ours.
newest_checkpoint() {
  readlink -- "$1/latest" ||
    find "$1" -maxdepth 1 -regex '.*/step_[0-9]+' -printf '%f\n' 2>/dev/null | sort --version-sort | tail -n 1 ||
    true
}

readonly STOPPED_EARLY='Timeout has been reached, stopping training early' # NeMo RL, which then ends with 0

# Whether the driver stopped though its time was not up: a user or a preemption wanted the nodes. Slurm signals a job
# LIMIT_SECONDS before its end, up to a minute early: see tools/draft/slurm.py.
readonly LIMIT_SECONDS=720
was_interrupted() {
  # shellcheck disable=SC2154 # log_dir is the job file's
  ! grep -qs 'stopping early: checkpointing.checkpoint_must_save_by' "${log_dir}/driver.log" &&
    ((EPOCHSECONDS + LIMIT_SECONDS < ${SLURM_JOB_END_TIME:-EPOCHSECONDS + 2 * LIMIT_SECONDS}))
}

# Whether Slurm has chosen this job to make room for another. With a grace time it tells the steps at once, and this
# script when that time is over; a cluster whose PreemptParameters have send_user_signal tells this script first.
was_preempted() {
  local text
  text="$(timeout 30 scontrol show job --oneliner "${SLURM_JOB_ID}")" || true
  [[ ${text} =~ \ PreemptTime=[0-9] ]]
}

resume_or_end() {
  local status=$1 before=$2 now=$3 most=$4 restarts=${SLURM_RESTART_COUNT:-0} saved='' reason='' why='' node
  local -a silent=() failed=()
  shift 4
  [[ -z ${now} || ${now} == "${before}" ]] || saved="saved ${now}"
  if ((status == 0)) && grep -qs "${STOPPED_EARLY}" "${log_dir}/driver.log"; then status=${EXIT_RESUME}; fi
  case "${status}" in
    0 | 2) return "${status}" ;;
    "${EXIT_RESUME}")
      reason=${saved}
      if [[ -z ${saved} ]] && was_interrupted; then reason='interrupted before its first save'; fi
      ;;
    *)
      [[ -z ${saved} ]] || reason="failed with status ${status} after it had ${saved}"
      mapfile -t silent < <(silent_nodes "$@")
      wait "$!"
      if ((${#silent[@]} == 0)) && was_preempted; then
        reason="preempted, ${saved:-saved nothing new}"
      elif ((${#silent[@]} == 0)); then
        mapfile -t failed < <(named_nodes "$@")
        if [[ -z ${reason} ]] && ((${#failed[@]})) && is_bring_up "${status}"; then judge_bring_up "${failed[@]}"; fi
      else
        for node in "${silent[@]}"; do say "node ${node} is lost: no slurmd answers there"; done
        ((restarts >= most)) || wait_for_slurm "${status}"
        reason="lost ${silent[*]}"
        mapfile -t failed < <(silent_nodes "${silent[@]}") # one that answers again may be used again
      fi
      ;;
  esac
  if [[ -z ${reason} ]]; then
    why=${why:-"this start saved no new checkpoint (newest: ${now:-none}), and the next one would not either"}
    say "not restarted: ${why}"
  elif ((restarts >= most)); then
    say "not restarted: this was restart ${restarts} of at most ${most} (MAX_RESTARTS); submit again to go on"
  else
    requeue "${reason}, restart $((restarts + 1)) of at most ${most}" "${failed[@]}"
  fi
  return "${status}"
}

# Wait for Slurm to put back a job whose node is lost, and to end this start: wait_for_slurm STATUS. Put back earlier, the
# job could get the same node again.
wait_for_slurm() {
  local status=$1 seconds
  seconds=$(($(setting SlurmdTimeout 300) + DOWN_MARGIN_SECONDS))
  trap 'say "Slurm ends this start"; exit "${status}"' TERM
  say "waiting at most ${seconds} s for Slurm to notice, too, and to requeue the job"
  sleep "${seconds}" >/dev/null 2>&1 &
  wait "$!"
  say 'Slurm has not noticed'
}

# Run a program for at most a minute. The TERM that Slurm sends to this script does not end it.
shielded() {
  timeout --kill-after=5 60 bash -c "trap '' TERM; exec \"\$@\"" bash "$@"
}

# requeue REASON [NODE...]: put the job back, to run without these nodes.
requeue() {
  local reason=$1 state tries list=''
  shift
  # Asked before the requeue: after it Slurm ends every program of this script that is not shielded.
  (($# == 0)) || list="$(nodes_to_leave_out "$@")"
  for ((tries = 0; tries < REQUEUE_TRIES; tries++)); do
    ((tries == 0)) || sleep "${REQUEUE_SECONDS}"
    # A job that was cancelled meanwhile stays cancelled: Slurm would requeue that one, too.
    state="$(timeout 30 scontrol show job --oneliner "${SLURM_JOB_ID}" | grep -o 'JobState=[A-Z_]*')" || continue
    if [[ ${state} != JobState=RUNNING ]]; then
      say "not restarted: the job's state is ${state#JobState=}"
      return
    fi
    if shielded scontrol requeue "${SLURM_JOB_ID}"; then
      trap '' TERM # Slurm's, for what the job was
      say "requeued: ${reason}"
      # Slurm takes this list only of a job that waits, and starts no job whose batch script still runs: it is in time.
      if [[ -n ${list} ]] && leave_out "${list}"; then
        say "the next start runs without $*"
      elif (($#)); then
        say "$* failed and may be used again: the partition has no other node, or Slurm did not take the list"
      fi
      return
    fi
  done
  say 'not restarted: Slurm did not take the requeue; submit again to go on'
}
