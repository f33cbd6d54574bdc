#!/usr/bin/env bash
#
# Install Python and exactly the packages of the GPU lock, by their hashes. Runs while the image is built; needs uv and
# nvcc.
#
# Environment: VENV, LOCK, MAX_JOBS.

set -euo pipefail
shopt -s inherit_errexit

readonly BUILD_TOOLS='^(setuptools|wheel|packaging|ninja)=='
# They compile against the torch of the lock, so they come after it.
readonly COMPILED='^(causal-conv1d|mamba-ssm|transformer-engine-torch)=='
# Else each would first look on GitHub for a file made by others, which no hash of the lock covers.
export CAUSAL_CONV1D_FORCE_BUILD=TRUE MAMBA_FORCE_BUILD=TRUE NVTE_PYTORCH_FORCE_BUILD=TRUE

main() {
  local tools packages compiled
  tools="$(mktemp)" packages="$(mktemp)" compiled="$(mktemp)"
  grep -E "${BUILD_TOOLS}" "${LOCK}" >"${tools}"
  grep -v -E "${COMPILED}" "${LOCK}" >"${packages}"
  grep -E "${COMPILED}" "${LOCK}" >"${compiled}"
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends build-essential ca-certificates git \
    iproute2 libibverbs1 ninja-build numactl
  rm -rf /var/lib/apt/lists/*
  uv venv --python 3.11 "${VENV}"
  # --no-deps: the lock is complete. No build isolation: what is built uses the build tools of the lock, installed first.
  install_packages "${tools}"
  install_packages "${packages}"
  # The base image has no cuDNN. Transformer Engine includes its headers, which come with a package of the lock.
  CPLUS_INCLUDE_PATH="${VENV}/lib/python3.11/site-packages/nvidia/cudnn/include" install_packages "${compiled}"
  uv cache clean
  rm -f -- "${tools}" "${packages}" "${compiled}"
}

install_packages() {
  uv pip install --python "${VENV}/bin/python" --no-deps --require-hashes --no-build-isolation --requirement "$1"
}

main "$@"
