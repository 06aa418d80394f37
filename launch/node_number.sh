# shellcheck shell=bash
# Take the number of this node from NODE_RANK or RANK. The launcher defines `fail` and check_number.
#
# NODE_RANK always numbers nodes. RANK numbers nodes too, unless a scheduler that starts one process per GPU has set it:
# then it numbers processes. LOCAL_RANK, LOCAL_WORLD_SIZE and WORLD_SIZE tell the two apart.

node_number=''   # empty if neither variable is set
number_source='' # the variable that it comes from

read_node_number() {
  local remedy='give --master on the first node and --worker R on the others'
  if [ -n "${LOCAL_WORLD_SIZE:-}" ] && [ "$LOCAL_WORLD_SIZE" != 1 ]; then
    fail "LOCAL_WORLD_SIZE is $LOCAL_WORLD_SIZE, so several processes were started on this node; start the launcher once per node, or $remedy"
  fi
  if [ -n "${LOCAL_RANK:-}" ] && [ "$LOCAL_RANK" != 0 ]; then
    fail "LOCAL_RANK is $LOCAL_RANK, so this is not the first process on this node; start the launcher once per node, or $remedy"
  fi
  if [ -n "${NODE_RANK:-}" ]; then
    node_number=$NODE_RANK number_source=NODE_RANK
    if [ -z "${LOCAL_RANK:-}" ] && [ "${RANK:-$NODE_RANK}" != "$NODE_RANK" ]; then
      fail "NODE_RANK is $NODE_RANK, but RANK is $RANK; unset the one that is not the number of this node, or $remedy"
    fi
  elif [ -n "${RANK:-}" ]; then
    node_number=$RANK number_source=RANK
    [ -z "${LOCAL_RANK:-}" ] ||
      fail "RANK is $RANK, but LOCAL_RANK is set too, so RANK numbers processes, not nodes; set NODE_RANK, or $remedy"
  else
    return 0
  fi
  check_number "$number_source" "$node_number" 0 999999
}

check_node_number() { # NNODES: refuse a number that the nodes do not have
  local most=${1##*:}
  [ -n "$number_source" ] || return 0
  if [ "$node_number" -ge "$most" ]; then
    fail "$number_source is $node_number, but $most nodes have the numbers 0 to $((most - 1)); set NODE_RANK to the number of this node"
  fi
  if [ "$number_source" = RANK ] && [ -n "${WORLD_SIZE:-}" ] && [ "$WORLD_SIZE" != "$most" ]; then
    fail "WORLD_SIZE is $WORLD_SIZE, but there are $most nodes, so RANK=$RANK may number processes; set NODE_RANK to the number of this node"
  fi
}
