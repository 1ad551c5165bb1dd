#!/bin/sh
# Builds and runs the check programs of the CUDA kernels (twell_cuda/tests/*_check.cu), on a machine with a GPU of
# compute capability 9.0. Each compares one kernel with plain loops; all run even where one fails.
#
#   check_cuda.sh            builds and runs           check_cuda.sh build FOLDER      builds only, into FOLDER
set -eu
here=$(cd "$(dirname "$0")" && pwd)
sources=$(cd "$here/../twell_cuda" && pwd)
run=yes
if [ "${1:-}" = build ]; then
  run=
  mkdir -p "$2"
  out=$(cd "$2" && pwd)
else
  out=$(mktemp -d)
  trap 'rm -rf "$out"' EXIT
fi
nvcc="${NVCC:-nvcc} -std=c++17 -O3 -gencode=arch=compute_90a,code=sm_90a -I. -I../shared"
jobs=$(getconf _NPROCESSORS_ONLN)

# host/bind_*.cpp bind the kernels to torch; the programs call what lies below them. Objects lie in folders as sources do.
cd "$sources"
find . -name '*.cu' -o -name '*.cpp' ! -name 'bind_*.cpp' \
  | xargs -P "$jobs" -I{} sh -c 'mkdir -p "$3/${2%/*}" && $1 -c "$2" -o "$3/$2.o"' sh "$nvcc" {} "$out"
checks=$(cd tests && ls ./*_check.cu | sed 's|^\./||; s|\.cu$||')
rm -f "$out/kernels.a"
objects=$(find "$out" -name '*.o' ! -name '*_check.cu.o')
# An archive leaves out what a program does not call.
ar qc "$out/kernels.a" $objects
echo "$checks" | xargs -P "$jobs" -I{} sh -c '$1 -o "$2/$3" "$2/tests/$3.cu.o" "$2/kernels.a"' sh "$nvcc" "$out" {}
[ -n "$run" ] || exit 0

failed=
for check in $checks; do
  case "$check" in
    decode_check | prefill_check) arguments=check ;;
    portable_check) arguments=--no-times ;;
    *) arguments= ;;
  esac
  echo "== $check"
  "$out/$check" $arguments || failed="$failed $check"
done
[ -z "$failed" ] || { echo "failed:$failed"; exit 1; }
