"""The openai client: a sum, and a second try if the first one is wrong.

    PYTHONPATH=docs/examples/agents realsys run experiment=arith_agents rollout.agent=openai_loop:run

It runs in the RolloutWorker, without rollout.agent_python.
"""

from openai import AsyncOpenAI


async def run(data, base_url, api_key, http_client, tries=2):
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)
    messages = [{"role": "user", "content": data["prompt"]}]
    for number in range(1, tries + 1):
        reply = await client.chat.completions.create(model="policy", messages=messages)
        message = reply.choices[0].message
        if (message.content or "").partition("#")[2] == data["answer"]:
            return {"reward": 1 / number, "correct": True}
        messages += [message, {"role": "user", "content": f"wrong; {data['prompt']}"}]
    return {"reward": 0.0, "correct": False}
