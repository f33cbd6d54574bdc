# shellcheck shell=bash
# shellcheck disable=SC2034,SC2154 # the job file has these variables
#
# The steps of a job: what they are started with, which one ended, and why. The job file sources this; it provides
# `say`, `die`, container.sh, and the variables named here.
#
#   make_log_dir                                make logs/attempt_N of `given[run_dir]` and set `log_dir`; begin.py
#                                               points logs/latest at it once this job has the run to itself
#   export_environment                          export the variables that the job's programs read, set `temp_dir`
#   step LABEL ROLE SRUN_OPTIONS -- COMMAND     start a step in the background; sets steps[PID] and roles[PID]
#   watch                                       wait for the first step to end, end the others; sets `status` and
#                                               `ended_role`
#   say_end PID STATUS                          say which step ended, on which node, and the last lines of its log
#   say_last_lines FILE                         say the last lines of one log
#   say_lost_nodes DIR                          say which nodes Slurm lost in the start with the log directory DIR

# Nodes that were asked to end have this time to copy their logs, and half a second more for each node of the job.
readonly CAUSE_LINES=5 END_SECONDS=20
# What srun makes of a signal that ends the driver's Python while it still loads; later each of them has a handler.
readonly KILLED_BY_USR1=138 KILLED_BY_TERM=143
# Variables of the shell that no process of a run gets: recipes/cluster/tuning.py says why.
readonly -a KEPT_BACK=(
  PYTHONHOME PYTHONINSPECT PYTHONOPTIMIZE PYTHONPLATLIBDIR PYTHONSAFEPATH PYTHONSTARTUP PYTHONWARNINGS
  NVIDIA_TF32_OVERRIDE TORCH_ALLOW_TF32_CUBLAS_OVERRIDE TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD GROUP_RANK LOCAL_RANK
  LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT RANK WORLD_SIZE VLLM_ALLOW_INSECURE_SERIALIZATION
  VLLM_ALLOW_RUNTIME_LORA_UPDATING VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT VLLM_DP_RANK VLLM_DP_SIZE VLLM_PLUGINS
  VLLM_PORT VLLM_RPC_BASE_PATH VLLM_SERVER_DEV_MODE
)

# One directory per start, also per requeue: nothing is overwritten.
make_log_dir() {
  local logs="${given[run_dir]}/logs" number=1
  until mkdir -- "${logs}/attempt_${number}" 2>/dev/null; do
    ((number < 10000)) || die "cannot create ${logs}/attempt_N"
    number=$((number + 1))
  done
  log_dir="${logs}/attempt_${number}"
}

export_environment() {
  local token times name
  token="$(od -vAn -N32 -tx1 /dev/urandom | tr -d ' \n')"
  # Nobody else can make this directory of the nodes before the job does. Short: Ray's sockets lie below it.
  temp_dir="/tmp/rl-${SLURM_JOB_ID}-${SLURM_RESTART_COUNT:-0}-$(od -vAn -N4 -tx1 /dev/urandom | tr -d ' \n')"
  export RAY_AUTH_MODE=token RAY_AUTH_TOKEN="${token}"            # nobody else on the network can run code in the cluster
  SANDBOX_TOKEN="$(od -vAn -N32 -tx1 /dev/urandom | tr -d ' \n')" # nor in its sandboxes
  export SANDBOX_TOKEN
  export RAY_USAGE_STATS_ENABLED=0 VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
  export PYTHONPATH="${PWD}" # the snapshot, before what is installed
  unset "${KEPT_BACK[@]}" "${!RAY_TLS_@}" RAY_ADDRESS RAY_AUTH_TOKEN_PATH RAY_NAMESPACE RAY_RUNTIME_ENV_HOOK RAY_USE_TLS
  # srun takes options from variables. A launch from the shell of an interactive job has passed on those of that job.
  unset SLURM_STEP_GRES SLURM_MEM_PER_CPU SLURM_MEM_PER_GPU SLURM_GPUS SLURM_GPUS_PER_TASK SLURM_NTASKS_PER_GPU \
    SLURM_GPU_BIND SLURM_CPUS_PER_GPU SLURM_TRES_PER_TASK SLURM_TIMELIMIT
  export SLURM_EXPORT_ENV=ALL
  # When the job started and when it will be ended, in Unix seconds; not every version of Slurm tells its jobs.
  times="$(timeout 60 env --unset=SLURM_TIME_FORMAT scontrol show job --oneliner "${SLURM_JOB_ID}")" || true
  for name in Start End; do
    if [[ ${times} =~ \ ${name}Time=([0-9T:-]+) ]]; then
      export "SLURM_JOB_${name^^}_TIME=$(date --date="${BASH_REMATCH[1]}" +%s)"
    fi
  done
}

step() {
  local label=$1 role=$2
  local -a options=() srun_options=() prefix=()
  shift 2
  until [[ $1 == -- ]]; do
    options+=("$1")
    shift
  done
  if [[ ${role} == sandbox ]]; then
    container_words "${given[runtime]}" "${given[sandbox]}" '' sandbox ''
  else
    container_words "${given[runtime]}" "${given[container]}" "${given[mounts]}" "${role//_/-}" "${PWD}" \
      "${given[variables]}"
  fi
  # Where the job has spare nodes, a worker that ends does not end the others: the driver knows what has run there.
  if [[ ${role} == ray_worker ]] && ((given[spares])); then options+=(--kill-on-bad-exit=0 --wait=0); fi
  # Every step may use all cores of its node. What srun itself says goes to a file: it names the node that failed.
  srun --overlap --kill-on-bad-exit=1 --wait=60 --cpu-bind=none --output="${log_dir}/${role}_%N.log" \
    "${options[@]}" "${srun_options[@]}" "${prefix[@]}" "${@:2}" 2>"${log_dir}/srun_${role}.log" &
  steps[$!]=${label}
  roles[$!]=${role}
}

# Wait until a step ends: it decides the status. A trapped signal interrupts `wait`, and no step has ended then.
watch() {
  local ended='' tries
  while [[ -z ${ended:-} ]]; do
    wait -n -p ended "${!steps[@]}" && status=0 || status=$?
    if [[ -n ${ended:-} ]] && kill -0 "${ended}" 2>/dev/null; then ended=''; fi
  done
  if [[ ${ended} != "${driver_pid}" ]]; then
    say_end "${ended}" "${status}"
    # A Ray node says this when its machine cannot be used. Only the driver may say 0, 2 or 75.
    [[ ${roles[${ended}]} == ray_* && ${status} == "${EXIT_NODE}" ]] || status=1
  elif ((status == KILLED_BY_USR1 || status == KILLED_BY_TERM)); then
    say 'the driver was asked to stop before it could take the signal: nothing had begun'
    status=${EXIT_RESUME}
  elif ((status != 0 && status != EXIT_RESUME)); then
    say "the driver ended with status ${status}; the last lines of ${log_dir}/driver.log:"
    say_last_lines "${log_dir}/driver.log"
  fi
  ended_role=${roles[${ended}]}
  unset "steps[${ended}]"
  # USR2 lets a node keep the logs of its Ray; what that does not end is killed.
  kill -USR2 "${!steps[@]}" 2>/dev/null || true
  for ((tries = 0; tries < (END_SECONDS + ${#nodes[@]} / 2) * 10; tries++)); do
    [[ -n $(jobs -rp) ]] || return 0
    sleep 0.1
  done
  kill -TERM "${!steps[@]}" 2>/dev/null || true
}

say_last_lines() {
  local line
  while read -r line; do say "  ${line}"; done < <(tail -n "${CAUSE_LINES}" "$1" 2>/dev/null)
}

say_end() {
  local role=${roles[$1]} node
  say "${steps[$1]} ended with status $2 before the driver"
  say_lost_nodes "${log_dir}"
  # srun's messages begin with "srun: error: NODE: "; one line per node is enough.
  while read -r node; do
    say "on ${node}: $(grep -m 1 "^srun: error: ${node}: " "${log_dir}/srun_${role}.log")"
    say_last_lines "${log_dir}/${role}_${node}.log"
  done < <(first_errors "${role}" | sed -n 's/^srun: error: \([^: ]*\): .*/\1/p' | sort -u)
}

# Slurm often ends the job file together with the node, before it has said anything; then the next start says it.
say_lost_nodes() {
  local line
  while read -r line; do say "  ${line}"; done < <(sort -u -- "$1"/srun_*.log 2>/dev/null |
    grep '^srun: error: Node failure on ')
}
