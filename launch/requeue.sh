# shellcheck shell=bash
# Before the time of a Slurm job is over, its batch script is told (#SBATCH --signal=B:USR1@90). The step is then told to save
# and end, and the job goes back into the queue, where it is the same run (launch/run_node.sh: also with checkpoint.resume=never).

stop_step() { # of a SIGTERM srun itself would make a SIGKILL
  echo "oneworld: the time of job $SLURM_JOB_ID is almost over: it saves and stops" >&2
  scancel --signal=TERM "$SLURM_JOB_ID" || true # in a trap a failure would end the script, and with it the job
}

# run_step COMMAND: the job's step, its exit status into `step_status`.
run_step() {
  local step
  is_over=''
  trap 'is_over=1; stop_step' USR1
  trap : TERM INT # scancel tells the step itself
  "$@" &
  step=$!
  while kill -s 0 "$step" 2>/dev/null; do wait "$step" || true; done # a signal ends the wait, not the step
  step_status=0
  wait "$step" || step_status=$?
}

# The job's end, after run_step: not in the queue again when the run has come to its own end, nor after scancel.
end_job() {
  local times=${SLURM_RESTART_COUNT:-0}
  if [ "$is_over" ] && [ "$step_status" != 0 ]; then
    if [ "$times" -ge "${ONEWORLD_MAX_REQUEUES:-100}" ]; then
      echo "oneworld: not requeued after $times times (ONEWORLD_MAX_REQUEUES)" >&2
    elif scontrol requeue "$SLURM_JOB_ID"; then
      echo "oneworld: job $SLURM_JOB_ID is requeued, and goes on from what it has saved" >&2
    else
      echo "oneworld: job $SLURM_JOB_ID cannot be requeued; submit it again with the same run.name" >&2
    fi
  fi
  exit "$step_status"
}
