# One task of the srun that starts the agents: bash -c "$(cat agent.sh)" agent FILE COMMAND ...
# It may run in a container, so it calls no program of SLURM.
no_coordinator=$1
shift
# At scancel SLURM sends SIGTERM to every process of a job. The workers must live until the last checkpoint is taken.
export REALSYS_SHIELDED=1
# The agent, which is signalled as well, decides when it ends.
trap : TERM INT USR1
trap '' HUP  # a job has no terminal: a SIGHUP is the kernel's, for processes whose parent has ended
"$@" --node "$SLURMD_NODENAME" &
agent=$!
while kill -0 "$agent" 2>/dev/null; do wait "$agent"; done  # a trap ends `wait` early
wait "$agent"
code=$?
# The agent had a launcher, and none is left, as when the first node is lost: guard.sh queues the job again.
if [ "$code" -eq 3 ]; then : > "$no_coordinator"; fi
exit "$code"
