#!/usr/bin/env bash
# Start a run on this machine, or on several machines that share a directory but have no scheduler.
#
#   launch/local.sh [--nproc M] [--print] [--config F] [key=value ...]
#   launch/local.sh --master --nnodes N --shared FOLDER [options] [--config F] [key=value ...]     on the first node
#   launch/local.sh --worker R --shared FOLDER [options] [--config F] [key=value ...]              on the others, with R from 1
#   NODE_RANK=R launch/local.sh --nnodes N --shared FOLDER [options] [--config F] [key=value ...]  on each node, with R from 0
#
#   --shared FOLDER   a directory that all nodes see, one for each cluster; workers find the head's address there, and the
#                     run's secret, in a file that only your user can read
#   --wait S          seconds that a worker waits for the head (default: 600)
#   --address A       address of the head, if it has several and the workers can use only one of them
#
# Without --master and --worker, the number of the node is NODE_RANK, or else RANK. Node 0 is the master. RANK is refused
# if other variables show that it numbers processes (launch/node_number.sh).
# Paths are relative to the repository. launch/run_node.sh --help describes the other options (--nproc, --port, --print),
# signals, restarts and ONEWORLD_* variables.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$here/.."

fail() {
  echo "oneworld: $1" >&2
  exit 2
}

# shellcheck source=launch/check_numbers.sh
. "$here/check_numbers.sh"
# shellcheck source=launch/secret.sh
. "$here/secret.sh"
# shellcheck source=launch/node_number.sh
. "$here/node_number.sh"
rank='' shared='' wait=600 address='' nnodes='' port=29500 print='' options=()
while [ $# -gt 0 ]; do
  case $1 in
    --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$here/local.sh" && exit ;;
    --master) rank=0 && shift ;;
    --print) print=1 options+=("$1") && shift ;;
    --worker | --shared | --wait | --address | --nnodes | --port | --nproc)
      [ $# -gt 1 ] || fail "$1 needs a value"
      case $1 in
        --worker) check_number "$1" "$2" 1 999999 && rank=$2 ;;
        --shared) shared=$2 ;;
        --wait) wait=$2 ;;
        --address) address=$2 ;;
        --nnodes) check_nodes "$2" && nnodes=$2 ;;
        --port) port=$2 ;;
        --nproc) options+=("$1" "$2") ;;
      esac
      shift 2
      ;;
    --) shift && break ;;
    *) break ;;
  esac
done
check_port "$port"
check_secret
if [ -z "$rank" ] && [ -n "$shared" ]; then
  read_node_number
  [ -n "$node_number" ] || fail "--shared needs the number of this node; give --master or --worker R, or set NODE_RANK"
  rank=$node_number
  [ -z "$nnodes" ] || check_node_number "$nnodes"
fi
if [ -z "$rank" ]; then
  [ "${nnodes:-1}" = 1 ] ||
    fail "--nnodes $nnodes needs --shared FOLDER, and --master on one node and --worker R on the others (or NODE_RANK on each)"
  exec "$here/run_node.sh" ${options[@]+"${options[@]}"} -- "$@"
fi
[[ $wait =~ ^[0-9]+([.][0-9]+)?$ ]] || fail "--wait: got '$wait'; it is a number of seconds"
[ -n "$shared" ] || fail "--master and --worker need --shared FOLDER, which all nodes see"
if ! command -v torchrun >/dev/null && [ -e .venv/bin/activate ]; then
  # shellcheck source=/dev/null
  . .venv/bin/activate
fi
if [ "$rank" = 0 ]; then
  [ "${nnodes:-1}" != 1 ] || fail "--master needs --nnodes N${number_source:+; $number_source is 0, so this node is the master}"
  launch=$(date +%Y%m%d-%H%M%S)-$$
  if [ -z "$print" ]; then
    exec 3< <(exec python "$here/find_head.py" serve "$shared" "$launch" "$nnodes" "$port" "$address")
    read -r ONEWORLD_SECRET <&3 || exit 2 # from now on the server answers, until this process ends
    export ONEWORLD_SECRET
    exec 3<&-
  fi
  address=${address:-$(python "$here/find_head.py" address)}
else
  found=$(python "$here/find_head.py" find "$shared" "$wait")
  mapfile -t found < <(printf '%s\n' "$found") # bash may write a here-string into a file
  [ "${nnodes:-${found[1]}}" = "${found[1]}" ] ||
    fail "--nnodes is $nnodes here, but ${found[1]} on the head; give the same on every node, or leave it out on workers"
  launch=${found[0]} nnodes=${found[1]} address=${found[2]} port=${found[3]}
  check_node_number "$nnodes"
  export ONEWORLD_SECRET="${found[4]}"
fi
exec "$here/run_node.sh" --nnodes "$nnodes" --head "$address" --port "$port" --node-rank "$rank" --launch "$launch" \
  ${options[@]+"${options[@]}"} -- "$@"
