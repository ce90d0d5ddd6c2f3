"""The agent of the tutorial: rollout.agent=agent:run. It knows nothing of realsys, only the address of an endpoint."""

import re


async def run(data, base_url, http_client, tries=2):
    body = {"model": "policy", "prompt": data["prompt"], "max_tokens": 200}
    number, consistent = 0, False
    while number < tries and not consistent:
        number += 1
        reply = await http_client.post(f"{base_url}/completions", json=body)
        reply.raise_for_status()
        steps = re.findall(r"(\d+)\+(\d+)=(\d+)", reply.json()["choices"][0]["text"])
        consistent = all(int(a) + int(b) == int(c) for a, b, c in steps)
    return {"metrics": {"tries": number}}  # without a reward: the verifier judges the last completion
