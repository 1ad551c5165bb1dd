#!/usr/bin/env bash
# Runs a command as on another processor; ATen, oneDNN, MKL and our own CPU kernels each have their cap.
#
#   capped.sh mixed COMMAND...   PyTorch's libraries as on AVX2, our kernels as where no vector instructions are known
#   capped.sh avx2 COMMAND...    all of them as on AVX2
#   capped.sh none COMMAND...    all of them as where no vector instructions are known
set -euo pipefail
cap=$1
shift
has_avx2=$(grep -qsw avx2 /proc/cpuinfo && echo yes || echo no)
[ "$has_avx2" = yes ] || [ "$cap" = none ] || { echo "no AVX2 here; nothing runs as on it"; exit 0; }
case "$cap" in
  mixed) libraries=avx2 kernels=portable ;;
  avx2) libraries=avx2 kernels=avx2 ;;
  none) libraries=none kernels=portable ;;
  *) sed -n '2,6p' "$0" >&2; exit 2 ;;
esac
case "$libraries" in
  avx2) caps="ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2" ;;
  none) caps="ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2" ;;
esac
# Inductor finds what it compiled by the graph alone: code for one cap would be taken under another, and fail.
cache=$(mktemp -d)
trap 'rm -rf "$cache"' EXIT
echo "Capped: PyTorch's libraries $libraries, our kernels $kernels."
env $caps HF_TWELL_CPU_ISA=$kernels TORCHINDUCTOR_CACHE_DIR="$cache" "$@"
