# shellcheck shell=bash
# Requeue a job at its time limit. Slurm sends a signal to the batch script before that (#SBATCH --signal=B:USR1@90). The
# step then saves and ends, and the job goes back into the queue. The requeued job continues the same run, even with
# checkpoint.resume=never (launch/run_node.sh).

stop_step() { # srun itself would turn a SIGTERM into a SIGKILL
  echo "oneworld: the time of job $SLURM_JOB_ID is almost over: it saves and stops" >&2
  scancel --signal=TERM "$SLURM_JOB_ID" || true # a failure in a trap would end the script, and the job with it
}

# run_step COMMAND: run the step of the job, and put its exit status into `step_status`.
run_step() {
  local step
  is_over=''
  trap 'is_over=1; stop_step' USR1
  trap : TERM INT # scancel signals the step itself
  "$@" &
  step=$!
  while kill -s 0 "$step" 2>/dev/null; do wait "$step" || true; done # a signal ends the wait, not the step
  step_status=0
  wait "$step" || step_status=$?
}

# end_job: end the job after run_step. Requeue it if its time is over, but not if the run has ended or after scancel.
end_job() {
  local times=${SLURM_RESTART_COUNT:-0}
  if [ "$is_over" ] && [ "$step_status" != 0 ]; then
    if [ "$times" -ge "${ONEWORLD_MAX_REQUEUES:-100}" ]; then
      echo "oneworld: not requeued after $times times (ONEWORLD_MAX_REQUEUES)" >&2
    elif scontrol requeue "$SLURM_JOB_ID"; then
      echo "oneworld: job $SLURM_JOB_ID is requeued, and will continue from its newest checkpoint" >&2
    else
      echo "oneworld: job $SLURM_JOB_ID cannot be requeued; submit it again with the same run.name" >&2
    fi
  fi
  exit "$step_status"
}
