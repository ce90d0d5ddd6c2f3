# One task of the srun that starts the agents: bash -c "$(cat agent.sh)" agent COMMAND ...
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
# No launcher is left, as when the first node is lost: SLURM keeps such a job, because it was submitted with --no-kill.
if [ "$code" -eq 3 ]; then scontrol requeue "$SLURM_JOB_ID" || scancel "$SLURM_JOB_ID"; fi
exit "$code"
