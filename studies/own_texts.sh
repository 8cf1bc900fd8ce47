#!/usr/bin/env bash
# All stages of a study of own texts: the model that its rows continue, a writer that has seen one half of the data, its
# candidates of the other half, and the study. The model must be in models/, the data in data/ (studies/README.md).
#
#   bash studies/own_texts.sh opus --parallel 7        # or t5, smollm2; further options are those of ngramloss study
#
# A stopped script is continued by the same command. WRITERS is the number of processes that write candidates, BATCH the number
# of sources that each reads at a time; set it where other programs need memory of the same GPU.
set -euo pipefail
name=${1:?"name a study: opus, t5 or smollm2"}
shift
runs=runs/own-texts/$name
writers=${WRITERS:-4}

train() { ngramloss train "studies/own_texts_$name.toml" --run "$runs/$1" "${@:2}"; }
train all & jobs=($!)     # goes on while candidates are written
train writer --set data.leave_out=1/2
for rank in $(seq 0 $((writers - 1))); do
  RANK=$rank WORLD_SIZE=$writers LOCAL_RANK=0 \
    ngramloss candidates "$runs/writer" --count 8 --out "$runs/unseen" ${BATCH:+--batch-size "$BATCH"} & jobs+=($!)
done
for job in "${jobs[@]}"; do wait "$job"; done

ngramloss study "studies/own-texts-$name.toml" --delete-models "$@"
