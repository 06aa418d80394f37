#!/usr/bin/env bash
# Source a file on a node, such as the activation script of a virtual environment, then run a command in that environment.
#
#   launch/activate.sh FILE COMMAND...
#
# FILE is relative to the repository; ~/ is the home directory on the node. It may have any commands, such as `module load`.
# Launchers call this with the FILE of --activate. Messages name the node, which launch/ssh.sh gives in ONEWORLD_NODE.
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
oneworld_node=${ONEWORLD_NODE:-${SLURM_NODEID:+$SLURM_NODEID (${SLURMD_NODENAME-})}}
oneworld_root=$PWD oneworld_file=$1
shift
oneworld_command=("$@")
oneworld_fail() {
  trap - EXIT
  echo "oneworld: node ${oneworld_node:-$(hostname)}: $1" >&2
  exit 2
}

case $oneworld_file in
  [~]/*) oneworld_file=$HOME${oneworld_file#?} ;;
  /*) ;;
  *) oneworld_file=$PWD/$oneworld_file ;;
esac
if [ ! -f "$oneworld_file" ] || [ ! -r "$oneworld_file" ]; then
  oneworld_fail "there is no file $oneworld_file that can be read; --activate needs it on every node, so create it there, or give another path"
fi
trap 'oneworld_fail "$oneworld_file called exit; --activate needs a file that returns, because the command runs after it"' EXIT
set -- # otherwise the file would see the command as its own arguments
# shellcheck source=/dev/null
. "$oneworld_file" || oneworld_fail "$oneworld_file returned status $?; --activate needs a file that succeeds, so fix its last command"
trap - EXIT
cd "$oneworld_root" || exit # the file may have gone elsewhere
exec "${oneworld_command[@]}"
