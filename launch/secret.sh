# shellcheck shell=bash
# Check or make the run's secret, by which nodes recognize each other (docs/security.md). The launcher defines `fail`.
# The secret travels in ONEWORLD_SECRET, never on a command line, which all users of a node can read.

check_secret() { # an empty secret counts as none
  [ -n "${ONEWORLD_SECRET:-}" ] || { unset ONEWORLD_SECRET && return; }
  if [ ${#ONEWORLD_SECRET} -lt 16 ] || [[ $ONEWORLD_SECRET == *[[:space:]]* ]]; then
    fail "ONEWORLD_SECRET is shorter than 16 characters, or has spaces; give a random one, such as the output of: openssl rand -hex 32"
  fi
  export ONEWORLD_SECRET
}
make_secret() { # keep the secret that the user has set
  [ -n "${ONEWORLD_SECRET:-}" ] || ONEWORLD_SECRET=$(od -An -N 32 -t x1 /dev/urandom | tr -d ' \n')
  check_secret
}
