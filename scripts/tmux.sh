#!/usr/bin/env bash
# Lay out a tmux session for one run: panes Trainer, Orchestrator and Inference that follow the run's logs.
#
#   bash scripts/tmux.sh              logs of outputs/
#   bash scripts/tmux.sh NAME         logs of outputs/NAME, as `rl --exp-id NAME` writes them
#   bash scripts/tmux.sh kill [NAME]  end the session
#
# Start the run in the Trainer pane, a shell that also shows the trainer's log; its commands have --exp-id NAME already.
# The panes follow logs that do not exist yet, and those of the next run. Set OUTPUT_DIR if runs are not in outputs/.
set -euo pipefail

usage() {
    sed -n '2,9s/^# \{0,1\}//p' "$0"
}

case "${1:-}" in
    -h | --help) usage && exit 0 ;;
    kill) action='kill' && name=${2:-} ;;
    *) action=start && name=${1:-} ;;
esac
if [[ -n $name && ! $name =~ ^[A-Za-z0-9_-][A-Za-z0-9_.-]*$ ]]; then
    echo "error: '$name' is not a valid experiment name" >&2
    exit 2
fi
if ! command -v tmux > /dev/null; then
    echo "error: tmux is not installed" >&2
    exit 2
fi

session=prime-rl${name:+-${name//./_}} # tmux forbids dots in names
output_dir=${OUTPUT_DIR:-outputs}
logs=$output_dir${name:+/$name}/logs

if [[ $action == kill ]]; then
    tmux kill-session -t "=$session" 2> /dev/null || {
        echo "error: there is no session $session" >&2
        exit 1
    }
    echo "ended session $session"
    exit 0
fi

# A pane: a shell that follows one log and stays usable after Ctrl-C.
follow() {
    printf 'trap : INT; tail -n +1 -F %q 2> /dev/null; trap - INT; exec %q' "$1" "${SHELL:-bash}"
}

# A pane: a shell for commands, with one log shown in the background, which Ctrl-C does not end. Commands write to the
# directory of the session: the tmux server may have been started with another environment.
work() {
    printf 'export OUTPUT_DIR=%q; ' "$output_dir"
    if [[ -n $name ]]; then
        printf 'export PRIME_EXP_ID=%q; echo %q; ' "$name" "experiment $name: commands in this pane write to ${1%/logs/*}"
    else
        printf 'unset PRIME_EXP_ID; '
    fi
    printf 'tail --pid=$$ -n +1 -F %q 2> /dev/null & exec %q' "$1" "${SHELL:-bash}"
}

if ! tmux has-session -t "=$session" 2> /dev/null; then
    trainer=$(tmux new-session -d -P -F '#{pane_id}' -s "$session" -n run -x 200 -y 50 "$(work "$logs/trainer.log")")
    orchestrator=$(tmux split-window -v -P -F '#{pane_id}' -t "$trainer" "$(follow "$logs/orchestrator.log")")
    inference=$(tmux split-window -v -P -F '#{pane_id}' -t "$orchestrator" "$(follow "$logs/inference.log")")
    tmux select-pane -t "$orchestrator" -T Orchestrator
    tmux select-pane -t "$inference" -T Inference
    tmux select-pane -t "$trainer" -T Trainer
    tmux set-option -t "$session" pane-border-status top > /dev/null
    tmux set-option -t "$session" pane-border-format ' #{pane_title} ' > /dev/null
    tmux select-layout -t "$session" even-vertical > /dev/null
fi
if [[ -t 1 && -z ${TMUX:-} ]]; then
    exec tmux attach-session -t "=$session"
fi
echo "session $session follows $logs; attach with: tmux attach -t $session"
