# One task per node, outside of the container, which ends with the job:
#     bash -c "$(cat guard.sh)" guard FILE JOB RESTARTS
# An agent that has lost its launcher writes FILE. SLURM keeps such a job, because it was submitted with --no-kill.
file=$1 job=$2 restarts=$3
trap '' HUP  # as in agent.sh
# Succeeds if the job runs, and neither SLURM nor another guard has queued it again.
is_left() {
  until shown=$(scontrol --oneliner show job "$job"); do sleep 5; done
  case "${shown%%$'\n'*}" in *" JobState=RUNNING "*" Restarts=$restarts "*) return 0 ;; *) return 1 ;; esac
}
exec {never}<> <(:)  # a pipe without a writer: to wait on it starts no process, as sleep does every second
while [ ! -e "$file" ]; do read -rt 1 -u "$never"; done
if is_left && ! scontrol requeue "$job" && is_left; then scancel "$job"; fi
