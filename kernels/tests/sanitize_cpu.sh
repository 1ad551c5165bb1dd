#!/bin/sh
# Builds and runs sanitize_cpu.cpp under the address and undefined-behaviour sanitizers, in a temporary folder.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
cxx="${CXX:-g++} -std=c++17 -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all -pthread"
cxx="$cxx -Wno-uninitialized -Wno-maybe-uninitialized"
avx512="-mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx2 -mfma -mf16c"
[ "$(uname -m)" = x86_64 ] || avx512=
sources="dense forward find down down_panels shared_rows backward backward_matrix"
for source in $sources isa isa_portable isa_avx2 isa_avx512 isa_avx512_bf16 isa_amx; do
  case "$source" in
    isa_avx2) flags=${avx512:+-mavx2 -mfma -mf16c} ;;
    isa_avx512) flags=$avx512 ;;
    isa_avx512_bf16) flags="$avx512 ${avx512:+-mavx512bf16}" ;;
    isa_amx) flags="$avx512 ${avx512:+-mavx512bf16 -mamx-tile -mamx-bf16}" ;;
    *) flags= ;;
  esac
  $cxx $flags -c "$here/../twell_cpu/$source.cpp" -o "$out/$source.o" &
done
$cxx -c "$here/sanitize_cpu.cpp" -o "$out/main.o"
wait
$cxx "$out"/*.o -o "$out/sanitize_cpu"
"$out/sanitize_cpu"
