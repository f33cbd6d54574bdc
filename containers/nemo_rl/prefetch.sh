#!/usr/bin/env bash
#
# Build the virtual environments of the Gym servers into the image, so that no node builds them when a job starts.
# Runs while the image is built from the NeMo RL image.
#
# Environment: CUDA (cu130), VLLM_VERSION of the servers (`lock`: what the base pins, for its own CUDA), WHEEL_ARCH
# (x86_64 or aarch64), PREFETCH (configurations, separated by blanks).

set -euo pipefail
shopt -s inherit_errexit

readonly SOURCE=/opt/nemo-rl
readonly WHEELS=https://github.com/vllm-project/vllm/releases/download

main() {
  local override wheel
  local -a files=()
  cd -- "${SOURCE}"
  read -r -a files <<<"${PREFETCH}"
  if [[ ${VLLM_VERSION} == lock ]]; then
    UV_TORCH_BACKEND="$(sed -n 's/^name = "pytorch-\(.*\)"/\1/p' pyproject.toml | head -n 1)" UV_LINK_MODE=hardlink \
      uv run python examples/nemo_gym/prefetch_venvs.py "${files[@]}"
    return
  fi
  # Use the released wheel for this CUDA; the lock of NeMo RL would build vLLM from source.
  wheel="vllm-${VLLM_VERSION}+${CUDA}-cp38-abi3-manylinux_2_35_${WHEEL_ARCH}.whl"
  override="$(mktemp)"
  printf 'vllm @ %s/v%s/%s\n' "${WHEELS}" "${VLLM_VERSION}" "${wheel}" >"${override}"
  UV_TORCH_BACKEND="${CUDA}" UV_OVERRIDE="${override}" UV_LINK_MODE=symlink \
    uv run python examples/nemo_gym/prefetch_venvs.py "${files[@]}"
  rm -f -- "${override}"
}

main "$@"
