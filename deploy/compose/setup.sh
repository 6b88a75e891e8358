#!/bin/sh
# Makes the run that compose.yaml joins: the trainer's key, the run, and the file by which the others find it. Once; later it
# finds everything made.
#   XDG_DATA_HOME  the trainer's data; the owner's key ends up there too, and belongs on a machine that is offline
#   RUN            name of the run
#   ADDRESS        multiaddress at which others dial the trainer
#   RUN_FILE       where the others find the run
# Arguments go to 'pulsenet run create'.
set -eu
run=$XDG_DATA_HOME/pulsenet/$RUN
key=$run/trainer/key.json
if [ ! -e "$run/run.json" ]; then
    mkdir -p "$run/trainer"
    if [ ! -e "$run/trainer/identity.key" ]; then
        # In place once its name is written down: what was stopped in between begins again.
        rm -f "$run/trainer/new.key"
        pulsenet keygen --json "$run/trainer/new.key" > "$key"
        mv "$run/trainer/new.key" "$run/trainer/identity.key"
    fi
    peer=$(python -c 'import json, sys; print(json.load(open(sys.argv[1]))["peer_id"])' "$key")
    pulsenet run create "$RUN" --authority "$peer" --trainer "$peer" --bootstrap "$ADDRESS/p2p/$peer" "$@"
fi
# First complete, then in place: the others may be looking for it.
cp "$run/run.json" "$RUN_FILE.new"
mv "$RUN_FILE.new" "$RUN_FILE"
