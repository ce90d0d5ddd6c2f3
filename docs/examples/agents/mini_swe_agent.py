"""mini-swe-agent: the model adds with a shell, then submits the sum.

    make agents-env
    PYTHONPATH=docs/examples/agents realsys run experiment=arith_agents rollout.agent=mini_swe_agent:run \
        rollout.agent_python=.venv-agents/bin/python

The model may write any command, so each runs in bubblewrap (apt install bubblewrap): it can read the programs of this
machine, write its own /tmp and the folder of its episode, and reach no network and no process of others.
"""

import os
import tempfile

os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "MSWEA_SILENT_STARTUP": "1"}  # no download of prices

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.extra.bubblewrap import BubblewrapEnvironment
from minisweagent.models.litellm_model import LitellmModel

PROMPTS = {"system_template": "Use bash.", "instance_template": "{{ task }}"}
ISOLATION = "--unshare-all --cap-drop ALL --die-with-parent --new-session --clearenv --setenv PATH /usr/bin:/bin"
PROGRAMS = "--ro-bind /usr /usr --ro-bind /bin /bin --ro-bind /lib /lib --ro-bind-try /lib64 /lib64"
SYSTEM = "--proc /proc --remount-ro /proc --dev /dev --remount-ro /dev --size 67108864 --tmpfs /tmp"


def shell(folder):
    bwrap = f"{ISOLATION} {PROGRAMS} {SYSTEM} --dir {folder} --remount-ro /"
    return BubblewrapEnvironment(cwd=folder, timeout=5, wrapper_args=bwrap.split())


def run(data, base_url, api_key, http_client):
    model = LitellmModel(
        model_name="openai/policy",
        model_kwargs={"api_base": base_url, "api_key": api_key},
        cost_tracking="ignore_errors",
        observation_template="{{ output.output }}",
    )
    with tempfile.TemporaryDirectory() as folder:
        agent = DefaultAgent(model, shell(folder), step_limit=3, max_consecutive_format_errors=1, **PROMPTS)
        ended = agent.run(data["prompt"])
    return ended.get("submission", "").strip() == data["answer"]
