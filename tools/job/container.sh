# shellcheck shell=bash
#
# Put the steps of a job into containers: pyxis, apptainer, podman, or none. The job file sources this.
#
#   local -a srun_options=() prefix=() removal=()
#   container_words RUNTIME IMAGE MOUNTS ROLE WORKDIR [VARIABLES]
#   srun ... "${srun_options[@]}" "${prefix[@]}" COMMAND...
#   container_remove RUNTIME ROLE...
#   srun --ntasks-per-node=1 ... "${removal[@]}"     # at the end of the job, when removal is not empty
#
#   IMAGE      as tools/draft/mounts.py spells it for the runtime; MOUNTS: SRC:DST[:ro],...
#   ROLE       the part of the job that the step is, e.g. ray-head
#   WORKDIR    working directory in the container; '' = the image's
#   VARIABLES  NAME,NAME,...: variables of the cluster's profile, which every step but the sandbox gets
#
# In every runtime a step sees the host's network, processes and /dev/shm, and the mounts: Ray's driver and its head
# are two containers that share one raylet. The image's entrypoint is not run. The role `sandbox` runs what a model
# wrote: it gets none of the job's tokens. Give it no mounts.
#
# A pyxis container has no name: it goes with its step, also when the job is cancelled. A named one would stay on the
# node, and a later step of that name would silently run its old image.
#
# Needs pyxis 0.16 (--container-env), apptainer 1.1 or podman 4.

# The job's variables that a container gets, also where the image has another value: names, or beginnings that end in
# an underscore. PATH and LD_LIBRARY_PATH stay the image's.
readonly -a CONTAINER_ENVIRONMENT=(
  PYTHONPATH RAY_ VLLM_ FLASHINFER_ TRITON_ HF_ TOKENIZERS_ WANDB_ SLURM_ CUDA_ NVIDIA_ NVTE_ NCCL_ GLOO_ UCX_ FI_
  TORCH_ PYTORCH_ OMP_ SIF_DIR NEMO_SKILLS_ SSL_CERT_ http_proxy https_proxy no_proxy
  HTTP_PROXY HTTPS_PROXY NO_PROXY
)
readonly -a SANDBOX_ENVIRONMENT=(NEMO_SKILLS_ SANDBOX_ LISTEN_PORT NGINX_PORT)
readonly -a RUNTIME_ENVIRONMENT=(PATH HOME USER XDG_ ENROOT_ APPTAINER_CACHEDIR APPTAINER_TMPDIR APPTAINER_NO_PRIVS)

# Fill `names` with the exported variables that have one of these names or begin with one of these beginnings.
container_environment() {
  local name start
  names=()
  while read -r name; do
    for start in "$@"; do
      if [[ ${name} == "${start}" || (${start} == *_ && ${name} == "${start}"*) ]]; then
        names+=("${name}")
        break
      fi
    done
  done < <(compgen -e)
}

container_name() {
  printf '%s-%s-%s' "$1" "${SLURM_JOB_ID}" "${SLURM_RESTART_COUNT:-0}"
}

container_words() {
  local runtime=$1 image=$2 mounts=$3 role=$4 workdir=$5 name mount joined
  local -a names=() each=() further=() shared=(--ipc=host --pid=host)
  IFS=, read -r -a further <<<"${6:-}"
  srun_options=() prefix=()
  if [[ ${role} == sandbox ]]; then
    if [[ ${runtime} != podman ]]; then # podman passes only what is named
      container_environment "${RUNTIME_ENVIRONMENT[@]}" "${SANDBOX_ENVIRONMENT[@]}"
      printf -v joined ',%s' "${names[@]}"
      srun_options=("--export=${joined#,}")
    fi
    container_environment "${SANDBOX_ENVIRONMENT[@]}"
    shared=()
  else
    container_environment "${CONTAINER_ENVIRONMENT[@]}" "${further[@]}"
  fi
  IFS=, read -r -a each <<<"${mounts}"
  case "${runtime}" in
    none) ;;
    pyxis)
      srun_options+=("--container-image=${image}" --no-container-mount-home --no-container-entrypoint
        --container-writable)
      if [[ -n ${mounts} ]]; then srun_options+=("--container-mounts=${mounts}"); fi
      if [[ -n ${workdir} ]]; then srun_options+=("--container-workdir=${workdir}"); fi
      # Without this the image's value of a variable wins over the job's.
      joined=''
      for name in "${names[@]}"; do [[ ${name} == SLURM_* ]] || joined+=",${name}"; done # no image sets Slurm's
      if [[ -n ${joined} ]]; then srun_options+=("--container-env=${joined#,}"); fi
      ;;
    apptainer)
      # The whole environment passes, and the host's values win, except for PATH. Without --no-home and --no-mount the
      # container, the sandbox too, would see home, /tmp and the working directory of the host.
      prefix=(apptainer exec --no-home "--no-mount=tmp,cwd" --writable-tmpfs)
      if [[ -n ${workdir} ]]; then prefix+=("--pwd=${workdir}"); fi
      for mount in "${each[@]}"; do prefix+=("--bind=${mount}"); done
      if [[ -e /dev/nvidiactl ]]; then prefix+=(--nv); fi
      prefix+=("${image}")
      ;;
    podman)
      name="$(container_name "${role}")"
      prefix=(podman run --rm --replace "--name=${name}" --entrypoint= --network=host "${shared[@]}" --ulimit=host)
      # What an inner sandbox (bubblewrap, apptainer) needs; that one contains the untrusted code.
      prefix+=(--security-opt=seccomp=unconfined --security-opt=label=disable --security-opt=unmask=ALL)
      if [[ -n ${workdir} ]]; then prefix+=("--workdir=${workdir}"); fi
      for mount in "${each[@]}"; do prefix+=("--volume=${mount}"); done
      # By name, so that values, tokens among them, stay off the command line. Slurm sets its own per task: by pattern.
      for name in "${names[@]}"; do [[ ${name} == SLURM_* ]] || prefix+=("--env=${name}"); done
      prefix+=('--env=SLURM_*')
      if [[ -e /dev/nvidiactl ]]; then prefix+=(--device=nvidia.com/gpu=all); fi
      prefix+=("${image}")
      ;;
    *)
      printf 'container.sh: unknown runtime %q\n' "${runtime}" >&2
      return 2
      ;;
  esac
}

# Fill `removal` with the command that removes this job's containers from a node: a killed podman leaves its own.
container_remove() {
  local runtime=$1 role
  shift
  removal=()
  [[ ${runtime} == podman ]] || return 0
  removal=(podman rm --force --ignore --time=10)
  for role in "$@"; do removal+=("$(container_name "${role}")"); done
}
