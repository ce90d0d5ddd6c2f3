#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=32
#SBATCH --mem=123392M
#SBATCH --job-name=math-t
#SBATCH --no-kill
#SBATCH --no-requeue
#SBATCH --signal=B:USR1@120
#SBATCH --open-mode=append
#SBATCH --chdir="/home/me/my work"
#SBATCH --output="/shared/runs/math/50%% off/job/job-%j.log"
#SBATCH --reservation=r
#SBATCH --constraint=ib&a100
#SBATCH --mail-type=END
# Made by `realsys submit`. The same script runs again when the job is queued again: the trial continues.

module load cuda/12.8
source ~/env/bin/activate
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
# cluster.slurm.requeue=false: the job is not queued again
exit "$code"
