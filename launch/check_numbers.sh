# shellcheck shell=bash
# Functions that check the numbers given to a launcher. The launcher defines `fail`.

check_number() { # OPTION VALUE LEAST MOST
  if [[ ! $2 =~ ^(0|[1-9][0-9]{0,5})$ ]] || [ "$2" -lt "$3" ] || [ "$2" -gt "$4" ]; then
    fail "$1: got '$2'; it is a whole number from $3 to $4"
  fi
}
check_port() { check_number --port "$1" 1 65534; } # preflight uses the next port
check_ranks() { check_number --nproc "$1" 1 1024; }
check_nodes() { # VALUE
  local least=${1%%:*} most=${1##*:}
  if [[ ! $1 =~ ^[1-9][0-9]{0,5}(:[1-9][0-9]{0,5})?$ ]] || [ "$least" -gt "$most" ]; then
    fail "--nnodes: got '$1'; it is a number of nodes from 1, or MIN:MAX"
  fi
}
