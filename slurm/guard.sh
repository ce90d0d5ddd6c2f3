# One task per node, outside of the container, which ends with the job: bash -c "$(cat guard.sh)" guard FILE JOB
# An agent that finds no launcher writes FILE. SLURM keeps such a job, because it was submitted with --no-kill.
trap '' HUP  # as in agent.sh
while [ ! -e "$1" ]; do sleep 1; done
scontrol requeue "$2" || scancel "$2"
