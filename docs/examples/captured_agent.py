"""An agent that knows nothing of realsys: it speaks to an OpenAI endpoint, and gets a second try.

PYTHONPATH=docs/examples realsys run experiment=arith_chat rollout.agent=captured_agent:run
"""

from openai import AsyncOpenAI


async def run(data, base_url, api_key, http_client, tries=2, wrong=0.0):
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)
    messages = [{"role": "user", "content": data["prompt"]}]
    for number in range(tries):
        reply = await client.chat.completions.create(model="policy", messages=messages)
        text = reply.choices[0].message.content
        if text.partition("#")[2] == data["answer"]:
            return {"reward": 1.0, "correct": True, "metrics": {"tries": number + 1}}
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"wrong; {data['prompt']}"}]
    return {"reward": wrong, "correct": False, "metrics": {"tries": tries}}
