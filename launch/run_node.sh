#!/usr/bin/env bash
# Run this node's part of a launch: preflight, then torchrun train.py, which is restarted after a failure.
# Every launcher calls this script, with the same arguments on every node.
#
#   launch/run_node.sh [options] [--] [train.py's arguments]
#
#   --nnodes N       number of nodes, or MIN:MAX (default: 1)
#   --nproc M        ranks on this node (default: its GPUs; if it has none, placement.num_gpus_per_node or 2)
#   --head HOST      name or address of the node that hosts the rendezvous; needed with several nodes
#   --port P         port of the rendezvous, 1 to 65534; preflight uses the next one (default: 29500)
#   --node-rank R    0 on the head (default: SLURM_NODEID; otherwise the head recognizes its own address)
#   --launch ID      the same on every node; names the run if run.name does not (default on one node: the time)
#   --preflight-only check the cluster and exit, as an init container does
#   --print          show the torchrun command and exit
#
# torchrun itself restarts a world that fails. This script starts torchrun again if torchrun ends with an error, for
# example when the head is lost. It does not do so if this launch wrote FATAL into the run's directory, if the ranks told
# torchrun to stop (bad settings, Ctrl-C on any node), or after a signal. SIGTERM and SIGINT are passed on, so that the
# run saves and ends. SIGUSR1 goes to the ranks, which save and continue. A requeued Slurm job continues from its newest
# checkpoint, even with checkpoint.resume=never.
#
#   ONEWORLD_MAX_ATTEMPTS  give up after this many attempts in a row (10) that each ended within ONEWORLD_LASTED_S
#                          seconds (300)
#   ONEWORLD_BACK_OFF_S    seconds before the second attempt (1), doubled for each later one, at most 60
#
# Before the first attempt, a roll call (launch/roll_call.py) names missing nodes, because torchrun would wait for them
# without a message. Then preflight (launch/preflight.py) checks the cluster in a world of its own. If either fails,
# nothing is started.
#
#   ONEWORLD_PREFLIGHT         0 starts without preflight
#   ONEWORLD_PREFLIGHT_WAIT_S  seconds for all nodes to come (300)
#   ONEWORLD_PREFLIGHT_S       seconds for the checks, once all ranks have met (30)
#   ONEWORLD_NODES             names of the nodes in the order of their ranks, set by launchers that know them
#
#   ONEWORLD_SECRET  the same random text on every node; only nodes that know it take part. One node makes its own. With
#                    several nodes and none, everybody on the network is trusted.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

fail() {
  echo "oneworld: $1" >&2
  exit 2
}

nnodes=1 nproc='' head='' port=29500 node_rank=${SLURM_NODEID:-} launch='' print='' preflight_only=''
while [ $# -gt 0 ]; do
  case $1 in
    --nnodes | --nproc | --head | --port | --node-rank | --launch)
      [ $# -gt 1 ] || fail "$1 needs a value"
      name=${1#--}
      printf -v "${name//-/_}" '%s' "$2"
      shift 2
      ;;
    --print) print=1 && shift ;;
    --preflight-only) preflight_only=1 && shift ;;
    --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit ;;
    --) shift && break ;;
    *) break ;;
  esac
done
# shellcheck source=launch/check_numbers.sh
. "$root/launch/check_numbers.sh"
check_nodes "$nnodes"
check_port "$port"
# shellcheck source=launch/secret.sh
. "$root/launch/secret.sh"
if [ "$nnodes" = 1 ]; then make_secret; else check_secret; fi
[ -z "$nproc" ] || check_ranks "$nproc"
[ -z "$node_rank" ] || check_number --node-rank "$node_rank" 0 999999

if [ ! -d "${TMPDIR:-/tmp}" ] || [ ! -w "${TMPDIR:-/tmp}" ]; then
  fail "TMPDIR is ${TMPDIR:-/tmp}, which is no folder on $(hostname) that you can write to; create it there, or unset TMPDIR"
fi

trap '' USR1 # there is nothing to save yet
cd "$root"
if ! command -v torchrun >/dev/null && [ -e .venv/bin/activate ]; then
  # shellcheck source=/dev/null
  . .venv/bin/activate
fi
# shellcheck source=launch/env.sh
. launch/env.sh

count_gpus() {
  local visible=${CUDA_VISIBLE_DEVICES-${HIP_VISIBLE_DEVICES-${ROCR_VISIBLE_DEVICES-unset}}}
  if [ "$visible" != unset ]; then
    tr ',' '\n' <<<"$visible" | sed '/^-1$/,$d; /^NoDevFiles$/,$d' | grep -c . || true # entries after -1 do not count
  elif command -v nvidia-smi >/dev/null; then
    nvidia-smi -L | grep -c '^GPU' || true
  else
    { grep -ls '^simd_count [1-9]' /sys/class/kfd/kfd/topology/nodes/*/properties || true; } | wc -l
  fi
}

if [ "$nnodes" = 1 ]; then
  launch=${launch:-$(date +%Y%m%d-%H%M%S)-$$}
elif [ -z "$head" ]; then
  fail "--nnodes $nnodes needs --head HOST, the same on every node"
fi
settings=$(python launch/settings.py "$launch" "$head" "$@") || exit 2
wanted_ranks='' resume='' address=''
{ read -r folder && read -r run && read -r wanted_ranks && read -r resume && read -r address; } <<<"$settings" || true
[ -n "$run" ] || fail "several nodes need one run: give run.name=NAME, or --launch ID, the same on every node"
# A requeued job must continue: resume=never would begin the run anew each time.
if [ "${SLURM_RESTART_COUNT:-0}" != 0 ] && [ "$resume" = never ]; then set -- "$@" checkpoint.resume=auto; fi
if [ -z "$nproc" ]; then
  nproc=$(count_gpus)
  [ "$nproc" != 0 ] || nproc=${wanted_ranks:-2}
fi

options=(--nnodes "$nnodes" --nproc-per-node "$nproc")
endpoint() {
  if [[ $head == *:* ]]; then echo "[$head]:$1"; else echo "$head:$1"; fi
}
if [ -n "$head" ]; then
  # Differences between the nodes go into the environment, so that the command is the same on all of them.
  [ -z "$node_rank" ] || export PET_RDZV_CONF="$PET_RDZV_CONF,is_host=$((node_rank == 0))"
  if [ "$node_rank" = 0 ] && [ -z "$address" ] && [[ $head =~ ^[0-9.]+$|: ]]; then address=$head; fi
  [ -z "$address" ] || export PET_LOCAL_ADDR="${PET_LOCAL_ADDR:-$address}"
  if [[ $head == *:* ]]; then export NCCL_SOCKET_FAMILY="${NCCL_SOCKET_FAMILY:-AF_INET6}"; fi
fi
torchrun_line() { # PORT ID PROGRAM ARGUMENTS: put the command into `line`
  line=(torchrun "${options[@]}")
  [ -z "$head" ] || line+=(--rdzv-endpoint "$(endpoint "$1")" --rdzv-id "$2")
  shift 2
  line+=("$@")
}
torchrun_line "$port" "$run" train.py "$@" "run.name=$run"
train_line=("${line[@]}")
if [ "$print" ]; then
  printf '%q ' "${train_line[@]}" | sed 's/ $/\n/'
  exit
fi

state=$(mktemp -d)
trap 'rm -rf "$state"' EXIT
export ONEWORLD_LAUNCHER=$$           # files older than this process belong to an earlier launch
export ONEWORLD_STOP_FILE="$state/stop" # the ranks create it when they tell torchrun to stop
# The ranks create this one when the console says why they end. It holds the line that must be repeated after
# torchrun's own messages. It is empty if torchrun leaves them out, as in our .venv (launch/quiet_torchrun.py).
export ONEWORLD_LAST_LINE_FILE="$state/last_line"
export ONEWORLD_WORLD_FILE="$state/world" # the id of the last world, and `tell` if this node tells the webhook its end
fatal_now() { stat -c '%i %y %s' "$folder/FATAL" 2>/dev/null || true; }
fatal_before=$(fatal_now)

child='' is_torchrun='' signal=''
end_by() {
  signal=$1
  [ -z "$child" ] || kill -s "$1" "$child" 2>/dev/null || true
}
save() {
  local ranks
  [ "$is_torchrun" ] || return 0
  read -r -d '' -a ranks < <(cat "/proc/$child/task/"*/children 2>/dev/null) || true
  [ ${#ranks[@]} = 0 ] || kill -s USR1 "${ranks[@]}" 2>/dev/null || true
}
trap 'end_by TERM' TERM
trap 'end_by INT' INT
trap 'end_by HUP' HUP
trap save USR1
dies_with_us=()
if command -v setpriv >/dev/null; then dies_with_us=(setpriv --pdeathsig KILL); fi # an orphan would hold the GPUs

run_child() { # COMMAND: put its exit status into `status`
  set -m # its own process group, so that Ctrl-C in a terminal reaches it only once, through this script
  # Slurm sends SIGUSR1 to every process of a step. torchrun, and a rank that is not ready to save yet, would die of it.
  (trap '' USR1 && exec "$@") </dev/null &
  child=$!
  set +m
  [ -z "$signal" ] || kill -s "$signal" "$child" 2>/dev/null || true
  while kill -s 0 "$child" 2>/dev/null; do wait "$child" || true; done # a signal ends the wait, not the child
  status=0
  wait "$child" || status=$?
  child=''
}

exit_after_signal() {
  if [ "$signal" ]; then exit $((128 + $(kill -l "$signal"))); fi
}

say_last() { # [LINE]: end the console with what the ranks have said, or else with LINE
  if [ -e "$ONEWORLD_LAST_LINE_FILE" ]; then
    cat "$ONEWORLD_LAST_LINE_FILE" >&2
  elif [ $# != 0 ]; then
    echo "oneworld: $1" >&2
  fi
}

end_unless_passed() {
  exit_after_signal
  if [ "$status" != 0 ]; then
    echo "oneworld: preflight failed, so nothing was started (ONEWORLD_PREFLIGHT=0 starts without it)" >&2
    exit "$status"
  fi
}
preflight=${ONEWORLD_PREFLIGHT:-1}
if [ "$preflight" != 0 ] && [ "$nnodes" != 1 ]; then
  run_child "${dies_with_us[@]}" python launch/roll_call.py "$head" $((port + 1)) "$nnodes" "$node_rank" "$run" "$port"
  if [ "$status" = 3 ]; then # the other nodes are training already
    status=0 preflight=0
  fi
  end_unless_passed
fi
if [ "$preflight" != 0 ]; then
  torchrun_line $((port + 1)) "$run-preflight" launch/preflight.py "$@" "run.name=$run"
  # The ranks write their verdict into a file, so that torchrun has no failure to report. LOGLEVEL hides what the other
  # agents log when one agent ends a moment before them. Real errors are raised anyway.
  variables=(LOGLEVEL=CRITICAL PET_MAX_RESTARTS=0 "PET_RDZV_CONF=$PET_RDZV_CONF,join_timeout=60"
    "ONEWORLD_PREFLIGHT_CODE=$state/preflight")
  [ -z "$head" ] || variables+=("ONEWORLD_HEAD=$head" "ONEWORLD_PORT=$port" "ONEWORLD_NODE_RANK=$node_rank")
  run_child "${dies_with_us[@]}" env "${variables[@]}" "${line[@]}"
  # If that file exists, the status of torchrun does not count: an agent may fail because another one ended first.
  if [ -e "$state/preflight" ]; then status=$(cat "$state/preflight"); fi
  end_unless_passed
fi
[ -z "$preflight_only" ] || exit 0

max_attempts=${ONEWORLD_MAX_ATTEMPTS:-10} lasted_s=${ONEWORLD_LASTED_S:-300} back_off_s=${ONEWORLD_BACK_OFF_S:-1}
short=0 delay=$back_off_s
while :; do
  began=$SECONDS is_torchrun=1
  rm -f "$ONEWORLD_LAST_LINE_FILE"
  run_child "${dies_with_us[@]}" "${train_line[@]}"
  took=$((SECONDS - began)) is_torchrun=''
  [ "$status" != 0 ] || exit 0
  [ -z "$signal" ] || say_last
  exit_after_signal
  fatal=$(fatal_now)
  if [ -n "$fatal" ] && [ "$fatal" != "$fatal_before" ]; then
    say_last "not restarted, see $folder/FATAL"
    exit 1
  fi
  if [ -e "$ONEWORLD_STOP_FILE" ]; then
    say_last "not restarted: the ranks told torchrun to stop"
    exit 1
  fi
  if [ "$took" -ge "$lasted_s" ]; then
    short=0 delay=$back_off_s
  fi
  short=$((short + 1))
  if [ "$short" -ge "$max_attempts" ]; then
    reason="gave up: $short attempts in a row ended within $lasted_s s (ONEWORLD_MAX_ATTEMPTS)"
    echo "oneworld: $reason" >&2
    world='' tells=''
    if [ -e "$ONEWORLD_WORLD_FILE" ]; then
      read -r world tells <"$ONEWORLD_WORLD_FILE" || true
    elif [ "$nnodes" = 1 ] || [ "$node_rank" = 0 ]; then # the ranks have never met
      world="$run-$(date +%s)-$$" tells=1
    fi
    if [ "$tells" ]; then
      python -m rl.watch.webhook "$run" "$SECONDS" "$reason" "$world" || true # does nothing without ONEWORLD_WEBHOOK
    fi
    exit 1
  fi
  echo "oneworld: torchrun ended with status $status after $took s; restarts in $delay s" >&2
  run_child sleep "$delay"
  exit_after_signal
  delay=$((delay * 2 < 60 ? delay * 2 : 60))
done
