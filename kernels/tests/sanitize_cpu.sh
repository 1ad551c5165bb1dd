#!/bin/sh
# Builds and runs sanitize_cpu.cpp under the address and undefined-behaviour sanitizers, in a temporary folder.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
sources="$here/../twell_cpu"
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
cxx="${CXX:-g++} -std=c++17 -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all -pthread -I$sources -I$here/../shared"
cxx="$cxx -Wno-uninitialized -Wno-maybe-uninitialized"
avx512="-mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx2 -mfma -mf16c"
[ "$(uname -m)" = x86_64 ] || avx512=
for source in $(cd "$sources" && find . -name '*.cpp' ! -name 'bind_*.cpp'); do
  case "$source" in
    */isa/avx2.cpp) flags=${avx512:+-mavx2 -mfma -mf16c} ;;
    */isa/avx512.cpp) flags=$avx512 ;;
    */isa/avx512_vnni.cpp) flags="$avx512 ${avx512:+-mavx512vnni}" ;;
    */isa/avx512_bf16.cpp) flags="$avx512 ${avx512:+-mavx512bf16}" ;;
    */isa/amx.cpp) flags="$avx512 ${avx512:+-mavx512bf16 -mamx-tile -mamx-bf16}" ;;
    *) flags= ;;
  esac
  mkdir -p "$out/${source%/*}"
  $cxx $flags -c "$sources/$source" -o "$out/$source.o" &
done
$cxx -c "$here/sanitize_cpu.cpp" -o "$out/main.o"
wait
$cxx $(find "$out" -name '*.o') -o "$out/sanitize_cpu"
"$out/sanitize_cpu"
