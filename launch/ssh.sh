#!/usr/bin/env bash
# Start a run on nodes over ssh. Each cluster has a name; several clusters may run side by side.
#
#   launch/ssh.sh start NAME --hosts FILE [options] [--config F] [key=value ...]
#   launch/ssh.sh follow NAME      show the output of all nodes until they end; Ctrl-C leaves them running
#   launch/ssh.sh status NAME      show which nodes run, and how the others ended
#   launch/ssh.sh save NAME        save now and continue
#   launch/ssh.sh stop NAME        save and stop; nodes that have not ended after ONEWORLD_STOP_S seconds (60) are killed
#   launch/ssh.sh run NAME COMMAND run a shell command in the repository of every node; with --node K only on that one
#   launch/ssh.sh list             list the clusters
#
#   --hosts FILE   a host or user@host in each line, the head first; empty lines and # comments are skipped
#   --dir D        the repository on the nodes (default: the path of this one)
#   --head A       the head's address for the other nodes (default: its name in the hosts file)
#   --port P       port of the rendezvous there (default: derived from the cluster's name)
#   --nproc M      ranks per node (default: its GPUs)
#   --activate F   a file on every node, sourced there before anything is started: the activation script of an environment,
#                  or any commands. It is relative to the repository, and ~/ is the home directory on the node
#   --forward V    also pass on the variable V, such as TMPDIR or PATH; may be repeated
#   --follow       show the output of all nodes, as `follow` does; Ctrl-C saves and stops
#   --print        show the torchrun command and exit
#
# The nodes continue without this machine; their output is in runs/.clusters/NAME. Variables such as HF_TOKEN, HF_HOME and
# NCCL_* are passed on through ssh's standard input (launch/forward.sh). So is the run's secret, which each start makes
# unless ONEWORLD_SECRET is set. ONEWORLD_SSH is the ssh command, such as "ssh -i KEY". Restarts: launch/run_node.sh --help
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

fail() {
  echo "oneworld: $1" >&2
  exit 2
}
usage() { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }

command=${1:---help} name=${2:-}
clusters=$root/runs/.clusters
case $command in
  --help) usage && exit ;;
  list) ls "$clusters" 2>/dev/null || true && exit ;;
  start | follow | status | save | stop | run) ;;
  *) fail "$command: give start, follow, status, save, stop, run or list" ;;
esac
[[ $name =~ ^[A-Za-z0-9._-]+$ && $name != -* ]] || fail "$command needs the cluster's name: letters, digits, . _ -"
shift 2
read -r -a ssh <<<"${ONEWORLD_SSH:-ssh} -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=15"
here=$clusters/$name

read_hosts() { # FILE: read it into `hosts`
  local lines number valid='^([A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9][A-Za-z0-9_.:-]*$'
  mapfile -t lines < <(sed 's/#.*//; s/^[[:space:]]*//; s/[[:space:]]*$//' "$1")
  hosts=()
  for number in "${!lines[@]}"; do
    [ -n "${lines[$number]}" ] || continue
    [[ ${lines[$number]} =~ $valid ]] ||
      fail "$1, line $((number + 1)): '${lines[$number]}' is no host; give HOST or user@HOST alone (--nproc: ranks per node)"
    hosts+=("${lines[$number]}")
  done
}

# Define helpers for commands on a node: the prefix of its files, and whether its process is alive. The start time of the
# process is compared too, because process ids are reused.
prelude() { # NODE
  printf 'cd %q || exit 2; node=runs/.clusters/%q/%q\n' "$dir" "$name" "$1"
  cat <<'REMOTE'
started() { sed 's/.*) //' "/proc/$1/stat" 2>/dev/null | cut -d ' ' -f 20; }
lives() { read -r pid start 2>/dev/null <"$node.pid" && [ "$(started "$pid")" = "$start" ]; }
end() { if [ -e "$node.exit" ]; then echo "ended with status $(cat "$node.exit")"; else echo "was lost"; fi; }
REMOTE
}
on() { # NODE: run the script from stdin there
  { prelude "$1" && cat; } | "${ssh[@]}" -- "${hosts[$1]}" bash -s
}
on_all() { # SCRIPT [NODE ...]: run it on these nodes, or on all; mark each line with its node; return the status of a failure
  local script=$1 node status=0 nodes=("${@:2}")
  [ ${#nodes[@]} -gt 0 ] || nodes=("${!hosts[@]}")
  pids=()
  set -m # one process group each, so that Ctrl-C reaches only this script, which decides what to do
  for node in "${nodes[@]}"; do
    { on "$node" <<<"$script" 2>&1 | sed -u "s/^/[$node ${hosts[$node]}] /"; } &
    pids+=($!)
  done
  set +m
  for node in "${!pids[@]}"; do
    wait "${pids[$node]}" && continue
    status=$? node=${nodes[$node]}
    [ "$status" != 255 ] || echo "[$node ${hosts[$node]}] cannot be reached"
  done
  return "$status"
}
hang_up() {
  local pid
  for pid in ${pids[@]+"${pids[@]}"}; do kill -s TERM -- "-$pid" 2>/dev/null || true; done
}
trap 'hang_up; exit 130' INT
# shellcheck disable=SC2016 # expanded on the nodes
follow() {
  on_all 'read -r pid start <"$node.pid" || { echo "was never started"; exit 1; }
    if lives; then tail -n +1 --pid "$pid" -F "$node.log" 2>/dev/null; else cat "$node.log"; fi
    end; exit "$(cat "$node.exit" 2>/dev/null || echo 1)"'
}

if [ "$command" != start ]; then
  [ -e "$here/hosts" ] || fail "no cluster $name; launch/ssh.sh list shows the clusters"
  read_hosts "$here/hosts"
  dir=$(cat "$here/dir")
fi
# shellcheck disable=SC2016 # expanded on the nodes
case $command in
  follow)
    trap 'hang_up; echo; echo "oneworld: the nodes continue; launch/ssh.sh stop $name stops them" >&2; exit 130' INT
    follow
    exit
    ;;
  run)
    only=()
    if [ "${1:-}" = --node ] && [ $# -gt 1 ]; then
      [[ $2 =~ ^[0-9]+$ && -n ${hosts[$2]:-} ]] || fail "--node $2: $name has nodes 0 to $((${#hosts[@]} - 1))"
      only=("$2") && shift 2
    fi
    [ $# -gt 0 ] || fail "run needs a command, such as: launch/ssh.sh run $name nvidia-smi"
    on_all "$*" ${only[@]+"${only[@]}"}
    exit
    ;;
  status)
    on_all 'if lives; then echo "runs, process $pid"; else end; fi'
    exit
    ;;
  save)
    on_all 'if lives; then kill -s USR1 -- "-$pid"; echo "saves"; else end; fi'
    exit
    ;;
  stop)
    on_all 'lives || { end; exit 0; }
      kill -s TERM -- "-$pid"
      deadline=$((SECONDS + '"${ONEWORLD_STOP_S:-60}"'))
      while lives && [ "$SECONDS" -lt "$deadline" ]; do sleep 0.2; done
      if lives; then kill -s KILL -- "-$pid"; echo "killed"; else end; fi'
    exit
    ;;
esac

# shellcheck source=launch/check_numbers.sh
. "$root/launch/check_numbers.sh"
# shellcheck source=launch/secret.sh
. "$root/launch/secret.sh"
# shellcheck source=launch/forward.sh
. "$root/launch/forward.sh"
make_secret
file='' dir=$root head='' port='' print='' follow='' activate='' options=()
while [ $# -gt 0 ]; do
  case $1 in
    --print) print=1 && shift ;;
    --follow) follow=1 && shift ;;
    --hosts | --dir | --head | --port | --nproc | --activate | --forward)
      [ $# -gt 1 ] || fail "$1 needs a value"
      case $1 in
        --hosts) file=$2 ;;
        --dir) dir=$2 ;;
        --head) head=$2 ;;
        --port) port=$2 ;;
        --nproc) check_ranks "$2" && options+=("$1" "$2") ;;
        --activate)
          [ -n "$2" ] || fail "--activate needs a file, such as /opt/env/bin/activate"
          activate=$2
          ;;
        --forward) ask_to_forward "$2" ;;
      esac
      shift 2
      ;;
    --) shift && break ;;
    *) break ;;
  esac
done
[ -e "$file" ] || fail "start needs --hosts FILE, with a host in each line"
read_hosts "$file"
[ ${#hosts[@]} -gt 0 ] || fail "$file names no host"
head=${head:-${hosts[0]##*@}}
[ -z "$port" ] || check_port "$port"
port=${port:-$((20000 + $(cksum <<<"$name" | cut -d ' ' -f 1) % 10000))}
node=(launch/run_node.sh --nnodes "${#hosts[@]}" --head "$head" --port "$port" --launch "$name-$(date +%Y%m%d-%H%M%S)"
  ${options[@]+"${options[@]}"})
if [ "$print" ]; then exec "$root/${node[0]}" "${node[@]:1}" --print -- "$@"; fi

# shellcheck disable=SC2016 # expanded on the nodes
if [ -e "$here/hosts" ]; then
  new=("${hosts[@]}") new_dir=$dir
  read_hosts "$here/hosts" && dir=$(cat "$here/dir")
  on_all 'if lives; then echo "still runs"; exit 3; fi' >&2 || fail "cluster $name is not free; stop it, or take another name"
  hosts=("${new[@]}") dir=$new_dir
fi
mkdir -p "$here"
printf '%s\n' "${hosts[@]}" >"$here/hosts"
echo "$dir" >"$here/dir"
export ONEWORLD_NODES="${hosts[*]##*@}" # for preflight, to name missing nodes
# Variables with the devices and the address hold for this machine only, unless they are asked for.
mapfile -t variables < <(forwarded_names | grep -Ev '_VISIBLE_DEVICES$|^PET_LOCAL_ADDR$')
variables+=(${forward[@]+"${forward[@]}"})
trap '"$root/launch/ssh.sh" stop "$name" >&2; exit 130' INT
for k in "${!hosts[@]}"; do
  {
    for variable in ${variables[@]+"${variables[@]}"}; do printf 'export %s=%q\n' "$variable" "${!variable}"; done
    printf 'export ONEWORLD_NODE=%q; activate=%q\n' "$k (${hosts[$k]})" "$activate"
    printf 'set -- %s\n' "$(printf '%q ' "${node[@]}" --node-rank "$k" -- "$@")"
    cat <<'REMOTE'
[ -e launch/run_node.sh ] || { echo "oneworld: no repository in $PWD; give --dir" >&2; exit 2; }
if [ -n "$activate" ]; then
  launch/activate.sh "$activate" true </dev/null || exit # so that an error is seen here, not in the log
  set -- launch/activate.sh "$activate" "$@"
fi
unwritable() {
  echo "oneworld: cannot write in $PWD/${node%/*}; make room and give write access there, or give another repository with --dir" >&2
  exit 2
}
{ mkdir -p "${node%/*}" && rm -f "$node.exit" "$node.pid"; } || unwritable
# Start a session that outlives this connection. Signals go to its process group, which torchrun does not belong to.
setsid bash -c 'node=$1; shift
  trap : TERM INT HUP USR1
  echo "$$ $(sed "s/.*) //" "/proc/$$/stat" | cut -d " " -f 20)" >"$node.new" && mv "$node.new" "$node.pid" || exit
  "$@"
  echo $? >"$node.exit"' bash "$node" "$@" >"$node.log" 2>&1 </dev/null &
until [ -e "$node.pid" ]; do
  kill -s 0 $! 2>/dev/null || [ -e "$node.pid" ] || unwritable
  sleep 0.05
done
REMOTE
  } | on "$k" || {
    echo "oneworld: node $k (${hosts[$k]}) was not started; stopping the others" >&2
    "$root/launch/ssh.sh" stop "$name" >&2 || true
    exit 1
  }
done
if [ -z "$follow" ]; then
  echo "oneworld: $name runs on ${#hosts[@]} nodes; launch/ssh.sh follow $name"
  exit
fi
echo "oneworld: $name runs on ${#hosts[@]} nodes; Ctrl-C saves and stops"
trap 'trap "" INT; "$root/launch/ssh.sh" stop "$name" || hang_up' INT # keep showing the output of the nodes meanwhile
follow
