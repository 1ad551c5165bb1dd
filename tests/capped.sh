#!/usr/bin/env bash
# Runs a command as on other processors; ATen, oneDNN, MKL and our own CPU kernels each have their cap.
#
#   capped.sh quick COMMAND...   once: PyTorch's libraries as on AVX2, our kernels as where no vector instructions are known
#   capped.sh all COMMAND...     twice: all of them as on AVX2, and all as where no vector instructions are known
set -euo pipefail
avx2="ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2"
none="ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2"
has_avx2=$(grep -qsw avx2 /proc/cpuinfo && echo yes || echo no)
which=$1
shift
# Inductor finds what it compiled by the graph alone: code for one cap would be taken under another, and fail.
caches=$(mktemp -d)
trap 'rm -rf "$caches"' EXIT
avx2="$avx2 TORCHINDUCTOR_CACHE_DIR=$caches/avx2"
none="$none TORCHINDUCTOR_CACHE_DIR=$caches/none"
case "$which" in
  quick)
    echo "PyTorch as on AVX2, our kernels as on any processor:"
    env $([ "$has_avx2" = yes ] && echo $avx2 || echo $none) HF_TWELL_CPU_ISA=portable "$@" ;;
  all)
    if [ "$has_avx2" = yes ]; then
      echo "As on AVX2:"
      env $avx2 HF_TWELL_CPU_ISA=avx2 "$@"
    fi
    echo "As on any processor:"
    env $none HF_TWELL_CPU_ISA=portable "$@" ;;
  *) sed -n '2,5p' "$0" >&2; exit 2 ;;
esac
