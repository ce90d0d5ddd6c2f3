#!/bin/bash
#SBATCH --nodes=5
#SBATCH --ntasks-per-node=1
#SBATCH --mem=0
#SBATCH --exclusive
#SBATCH --gpus-per-node=h100:8
#SBATCH --partition=gpu
#SBATCH --job-name=math-t
#SBATCH --account=a1
#SBATCH --time=1-00:00:00
#SBATCH --no-kill
#SBATCH --requeue
#SBATCH --signal=B:USR1@300
#SBATCH --open-mode=append
#SBATCH --chdir="/home/me/my work"
#SBATCH --output="/shared/runs/math/50%% off/job/job-%j.log"
# Made by `realsys submit`. The same script runs again when the job is queued again: the trial continues.

export PYTHONPATH='/shared/realsys:/home/me/own code'
# SLURM sends USR1 before the time limit, to this shell only. The run takes a checkpoint and ends with code 138.
# A signal that comes before the run has begun is passed on afterwards.
run= early=
trap 'if [ -n "$run" ]; then kill -USR1 "$run"; else early=1; fi' USR1
# At scancel SLURM signals every process of the job. The run must not be signalled twice.
trap : TERM INT
/shared/venv/bin/python -m realsys.launch.cli run experiment=math 'data.train=a b.jsonl' &
run=$!
[ -z "$early" ] || kill -USR1 "$run"
while kill -0 "$run" 2>/dev/null; do wait "$run"; done  # a trap ends `wait` early
wait "$run"
code=$?
if [ "$code" -eq 4 ]; then
  code=138  # the job has lost a node, and no spare could take its place
fi
if [ "$code" -eq 138 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
