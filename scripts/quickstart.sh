#!/usr/bin/env bash
# Trains a small model on this machine, installation included. The first names make their data; the
# last three download a public data set, whose licence they print.
#
#   bash scripts/quickstart.sh                 a ResNet on 1,437 handwritten digits
#   bash scripts/quickstart.sh ssd             an SSD that finds digits on images of clutter
#   bash scripts/quickstart.sh mask_rcnn       a Mask R-CNN that outlines them
#   bash scripts/quickstart.sh transformer     a Transformer that translates dates, numbers and
#                                              amounts from English to German
#   bash scripts/quickstart.sh gnmt            LSTMs that translate the same sentences
#   bash scripts/quickstart.sh ncf             NeuMF on synthetic ratings whose best score is known
#   bash scripts/quickstart.sh finetune        a model of the digits 0-4, which then learns 5-9 from
#                                              20 pictures each
#   bash scripts/quickstart.sh finetune_ssd    an SSD that finds 0-4, and then 5-9 after 60 images
#   bash scripts/quickstart.sh translate       a Transformer on 29,000 captions, German to English
#                                              (Multi30k, 1.3 MB)
#   bash scripts/quickstart.sh recommend       NeuMF on 100,000 ratings of films (MovieLens, 5 MB)
#   bash scripts/quickstart.sh flowers         a ResNet on 3,670 photos of flowers (229 MB)
#   bash scripts/quickstart.sh ssd FLAGS       FLAGS are main.py's, such as --workdir=runs/other or
#                                              --config.train_steps=100; with finetune those of the
#                                              second training
#
# It takes 1 to 7 minutes on two CPU cores, after 1 to 3 minutes of installation; flowers about half
# an hour, translate 75 minutes. The environment: PYTHON=python3.12 chooses the interpreter, VENV=.venv-3.12
# the folder of the installed packages.
set -euo pipefail

. "$(dirname -- "${BASH_SOURCE[0]}")/usage.sh"
usage "$@"
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
name=digits
case "${1-}" in
  '' | -*) ;;
  digits | ssd | mask_rcnn | transformer | gnmt | ncf | finetune | finetune_ssd | \
    translate | recommend | flowers)
    name="$1"
    shift
    ;;
  *)
    echo "ERROR: quickstart.sh $1: give nothing, ssd, mask_rcnn, transformer, gnmt, ncf, finetune, finetune_ssd, translate, recommend, flowers, or flags of main.py" >&2
    exit 2
    ;;
esac
SETUP_CALLER=quickstart.sh bash scripts/setup.sh dev
program="${VENV:-.venv}/bin/python"

public=''  # a data set that is downloaded
variant='' # of the recipe
some=''    # arguments of the maker
flags=''   # of the recipe for it, quoted, with a space at the end
case "$name" in
  digits) maker=digits recipe=digits data=data/digits ;;
  ssd) maker=digit_scenes recipe=ssd_digits data=data/digit_scenes ;;
  mask_rcnn) maker=digit_scenes recipe=mask_rcnn_digits data=data/digit_scenes ;;
  transformer) maker=phrases recipe=phrases data=data/phrases ;;
  gnmt) maker=phrases recipe=gnmt_phrases data=data/phrases ;;
  ncf) maker=ratings recipe=ncf_synthetic data=data/ratings ;;
  finetune)
    "$program" -m scripts.prepare digits --out=data/digits_0-4 --digits=0-4
    "$program" main.py --config=configs/digits.py --workdir=runs/digits_0-4 \
      --config.data_dir=data/digits_0-4 --config.num_label_classes=5 --config.num_filters=16 \
      --config.train_steps='12 epochs'
    set -- --config.init_from=runs/digits_0-4 "$@"
    maker=digits recipe=finetune variant=digits data=data/digits_5-9 some='--digits=5-9 --per_class=20'
    ;;
  finetune_ssd)
    "$program" -m scripts.prepare digit_scenes --out=data/scenes_0-4 --digits=0-4 --train_images=3000
    "$program" main.py --config=configs/ssd_digits.py --workdir=runs/scenes_0-4 \
      --config.data_dir=data/scenes_0-4 --config.num_classes=0 --config.train_steps=1000 \
      --config.steps_per_eval=1000
    set -- --config.init_from=runs/scenes_0-4 "$@"
    maker=digit_scenes recipe=finetune variant=ssd_digits data=data/scenes_5-9
    some='--digits=5-9 --train_images=60'
    ;;
  translate) public=multi30k ;;
  recommend) public=ml-100k ;;
  flowers) public=flower_photos ;;
esac
if [[ "$public" ]]; then
  log="$(mktemp)"
  trap 'rm -f -- "$log"' EXIT
  "$program" -m scripts.prepare download "$public" --untimed | tee -- "$log"
  # It prints the command of a small model last, or before that of a large one. The command is quoted
  # for a shell, and names the workdir at its end.
  command="$(sed -n 's/.*python main.py --config=\(configs\/small.py:.* \)--workdir=.*/\1/p' "$log" | tail -n 1)"
  config="${command%% *}" run="$public" flags="${command#* }"
  eval "set -- $flags"'"$@"'
else
  config="configs/$recipe.py${variant:+:$variant}"
  run="$recipe${variant:+_$variant}"
fi

# main.py takes the last --workdir, and the hints below must name the same.
workdir="runs/$run"
previous=''
for argument in "$@"; do
  case "$argument" in
    --workdir=* | -workdir=*) workdir="${argument#*=}" ;;
    *) case "$previous" in --workdir | -workdir) workdir="$argument" ;; esac ;;
  esac
  previous="$argument"
done

if [[ ! "$public" ]]; then
  # shellcheck disable=SC2086 # several words
  "$program" -m scripts.prepare "$maker" --out="$data" $some
fi
"$program" main.py "--config=$config" "--workdir=runs/$run" "$@"

printf -v quoted '%q' "$workdir"
if [[ "$name" == translate ]]; then # the test set that others report on
  test="$PWD/data/raw/multi30k/test_2016_flickr"
  set -- "$@" --config.eval_source="$test.de" --config.eval_references="$test.en"
fi
case "$name" in
  digits | finetune | ncf | recommend | flowers) ;;
  *) "$program" main.py "--config=$config" "--workdir=runs/$run" "$@" --mode=eval ;;
esac
report="$program main.py --mode=report --workdir=$quoted"
export="$program main.py --mode=export --workdir=$quoted"
export_line="
  export                $export"
case "$name" in
  digits)
    next="
  classify digits       $program predict.py ${data}_photos --workdir=$quoted"
    export_line="
  export                $export --format=onnx,savedmodel,stablehlo
  fine-tune             bash scripts/quickstart.sh finetune"
    ;;
  finetune)
    next="
  classify digits       $program predict.py ${data}_photos --workdir=$quoted"
    ;;
  flowers)
    next="
  classify photos       $program predict.py photo.jpg folder/ --workdir=$quoted"
    ;;
  ssd | mask_rcnn | finetune_ssd)
    next="
  find objects          $program predict.py $data/coco/val --workdir=$quoted --draw=$quoted/drawn
  what it found         $quoted/eval/detections.png, with the true boxes beside it"
    ;;
  transformer | gnmt | translate)
    "$program" -c 'import sys; from etils import epath; print(epath.Path(sys.argv[1]).read_text())' \
      "$workdir/eval/sentences.txt"
    next="
  translate             $program predict.py \"A sentence.\" --workdir=$quoted
  all translations      $quoted/eval/translations.tsv"
    ;;
  ncf | recommend)
    [[ "$public" ]] || "$program" -c 'import json, sys; from etils import epath
known = json.loads((epath.Path(sys.argv[1]) / "baselines.json").read_text())
rows = map(json.loads, (epath.Path(sys.argv[2]) / "metrics.jsonl").read_text().splitlines())
known["run"] = max(row.get("hr_at_10") or 0 for row in rows)
print("HR@10: popularity {popularity_hr_at_10:.3f}, this run {run:.3f}, best possible {ceiling_hr_at_10:.3f}".format(**known))' "$data" "$workdir"
    next="
  recommend items       $program predict.py --user=1 --top=10 --workdir=$quoted"
    ;;
esac
cat <<EOF

Next:$next
  look at its mistakes  $report$export_line
  a page to try it on   $program -m scripts.demo --workdir=$quoted
  curves                ${program%python}tensorboard --logdir=$quoted
  evaluate again        $program main.py --config=$config $flags--workdir=$quoted --mode=eval
  your data, and TPUs   docs/README.md
EOF
