#!/bin/bash
@directives@
# Made by `realsys submit`. The same script runs again when the job is queued again: the trial continues.

@setup@
# SLURM sends USR1 before the time limit, to this shell only. The run takes a checkpoint and ends with code 138.
# A signal that comes before the run has begun is passed on afterwards.
run= early=
trap 'if [ -n "$run" ]; then kill -USR1 "$run"; else early=1; fi' USR1
# At scancel SLURM signals every process of the job. The run must not be signalled twice.
trap : TERM INT
@command@ &
run=$!
[ -z "$early" ] || kill -USR1 "$run"
while kill -0 "$run" 2>/dev/null; do wait "$run"; done  # a trap ends `wait` early
wait "$run"
code=$?
@requeue@
exit "$code"
