# shellcheck shell=bash
#
# Which nodes of a job cannot be used. The job file sources this; it provides `log_dir` and `ended_role`.
#
#   down_nodes LIST           print what Slurm says of those nodes of LIST that it cannot use
#   silent_nodes NODE...      print the nodes on which no slurmd answers
#   named_nodes NODE...       print the nodes that the failure of the job names
#   first_errors ROLE         print what srun said of a step before it ended the rest of it
#   nodes_to_leave_out NODE... print these nodes and those that earlier starts left out
#   leave_out LIST            have Slurm start the waiting job without these nodes
#   has_enough_nodes LIST     whether the partition has enough nodes when those of LIST are left out
#   is_bring_up STATUS        whether a start has failed before it could train
#   judge_bring_up NODE...    set `reason` when a start without these nodes can do better, else `why`
#   setting NAME DEFAULT      print a number of the controller's configuration

readonly PROBE_SECONDS=10 EXIT_NODE=69 MAX_BRING_UPS=3

down_nodes() {
  timeout 10 sinfo --noheader --Node --nodes="$1" --states=down,drain,fail,no_respond --format='%N is %T: %E' || true
}

# Print a number of the controller's configuration: setting NAME DEFAULT.
setting() {
  local text
  text="$(timeout 10 scontrol show config | sed -n "s/^$1 *= *\([0-9][0-9]*\).*/\1/p")" || true
  printf '%s' "${text:-$2}"
}

# Print the nodes on which no slurmd answers: switched off, cut off, or crashed. When all seem to be, also the one that
# runs this, the probe says nothing: this bash may have no /dev/tcp, or slurmd another port.
silent_nodes() {
  local node port tries
  local -a silent=()
  local -A probes=()
  port="$(setting SlurmdPort 6818)"
  for node in "$@"; do
    (: <"/dev/tcp/${node}/${port}") 2>/dev/null &
    probes[${node}]=$!
  done
  for ((tries = 0; tries < PROBE_SECONDS * 5; tries++)); do
    [[ -z $(jobs -rp) ]] || sleep 0.2
  done
  for node in "$@"; do
    kill -TERM "${probes[${node}]}" 2>/dev/null || true # the kernel itself would try for minutes
    wait "${probes[${node}]}" || silent+=("${node}")
  done
  if ((${#silent[@]} == $#)) && [[ " $* " == *" ${SLURMD_NODENAME:-none} "* ]]; then return; fi
  ((${#silent[@]} == 0)) || printf '%s\n' "${silent[@]}"
}

# The nodes on which srun itself ends the tasks that are left have not failed, but it names them in the same way.
first_errors() {
  # shellcheck disable=SC2154 # log_dir is the job file's
  sed '/Terminating StepId=/q' "${log_dir}/srun_$1.log" 2>/dev/null || true
}

# Print the nodes that a failure names: of a step, those on which srun says that it failed; of the driver, those in its
# last message, by name ("node n2") or by address. Nothing when the failure names none of them, or all.
named_nodes() {
  local node word said='' is_named
  local -a named=() words=()
  # shellcheck disable=SC2154 # ended_role and log_dir are the job file's
  if [[ ${ended_role} == driver ]]; then
    said="$(tail -n 3 "${log_dir}/driver.log" 2>/dev/null)" || true
  else
    said="$(first_errors "${ended_role}")"
  fi
  for node in "$@"; do
    if [[ ${ended_role} == driver ]]; then
      mapfile -t words < <(getent ahosts "${node}" | awk '{ print $1 }' | sort -u)
      is_named=''
      for word in "node ${node}" "${words[@]}"; do
        [[ ! ${said} =~ (^|[^[:alnum:]_.-])"${word}"($|[^[:alnum:]_-]) ]] || is_named=1
      done
      [[ ${is_named} ]] || continue
    else
      [[ $'\n'${said} == *$'\n'"srun: error: ${node}: "* ]] || continue
    fi
    named+=("${node}")
  done
  if ((${#named[@]} && ${#named[@]} < $#)); then printf '%s\n' "${named[@]}"; fi
}

# Print these nodes and those that earlier starts have left out; nothing when the others are too few.
nodes_to_leave_out() {
  local text list
  text="$(timeout 30 scontrol show job --oneliner "${SLURM_JOB_ID}")" || true
  list="$(printf '%s\n' "$@" | paste -sd,)"
  if [[ ${text} =~ \ ExcNodeList=([^ ]+) && ${BASH_REMATCH[1]} != '(null)' ]]; then list+=",${BASH_REMATCH[1]}"; fi
  if has_enough_nodes "${list}"; then printf '%s' "${list}"; fi
}

# Whether the partition of this job has enough nodes when those of a list are left out: has_enough_nodes NODE,NODE...
has_enough_nodes() {
  local others
  others="$(timeout 30 sinfo --noheader --Node --partition="${SLURM_JOB_PARTITION}" --format=%N |
    sort -u | grep -cvxF -f <(timeout 30 scontrol show hostnames "$1"))" || true
  ((${others:-0} >= ${SLURM_JOB_NUM_NODES:-1}))
}

# Whether a start has failed before the driver could begin, or the driver says that it failed for some of its nodes.
is_bring_up() {
  (($1 == EXIT_NODE)) || [[ ${ended_role} != driver && ! -e ${log_dir}/bring_up.json ]]
}

# Set `reason` when a start without these nodes can do better, else say why not: judge_bring_up NODE...
judge_bring_up() {
  local number=$((${log_dir##*_} - 1)) in_a_row=1
  printf '%s' "${SLURM_JOB_ID}" >"${log_dir}/bring_up_failed"
  while [[ $(cat -- "${log_dir%_*}_${number}/bring_up_failed" 2>/dev/null) == "${SLURM_JOB_ID}" ]]; do
    in_a_row=$((in_a_row + 1)) number=$((number - 1))
  done
  why="${*} did not come up"
  if ((in_a_row > MAX_BRING_UPS)); then
    why+=", and ${in_a_row} starts in a row have failed so"
  elif [[ -z $(nodes_to_leave_out "$@") ]]; then
    why+=', and the partition has no other node for the job'
  else
    # shellcheck disable=SC2034 # it is the caller's
    reason="${why}"
  fi
}

# Slurm's TERM comes once, and may end a program that has not begun to ignore it.
leave_out() {
  local tries
  for ((tries = 0; tries < 3; tries++)); do
    if shielded scontrol update "JobId=${SLURM_JOB_ID}" "ExcNodeList=$1"; then return 0; fi
  done
  return 1
}
