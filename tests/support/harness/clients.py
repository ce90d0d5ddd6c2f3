"""Agents of users that call the model with OpenAI's client."""

from typing import Any

import openai
from openai import AsyncOpenAI, OpenAI

TURNS = 3


async def talks(data: dict[str, Any], base_url: str, api_key: str, http_client: Any) -> dict[str, Any]:
    """Return a reward for each completion."""
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)
    messages, rewards = [{"role": "user", "content": data["prompt"]}], {}
    for number in range(TURNS):
        reply = await client.chat.completions.create(model="policy", messages=messages)
        rewards[reply.id] = number + 1.0
        messages += [reply.choices[0].message.model_dump(), {"role": "user", "content": "again"}]
    return {"rewards": rewards, "metrics": {"level": data["level"]}}


async def asks_temperatures(data: dict[str, Any], base_url: str, api_key: str, http_client: Any) -> float:
    """Ask for a temperature in each turn; the last is greedy."""
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)
    messages = [{"role": "user", "content": data["prompt"]}]
    for temperature in (0.5, 1.0, 1.5, 0.0):
        reply = await client.chat.completions.create(model="policy", messages=messages, temperature=temperature)
        messages += [reply.choices[0].message.model_dump(), {"role": "user", "content": "again"}]
    return 1.0


def talks_in_process(data: dict[str, Any], base_url: str, api_key: str) -> None:
    """Have the environment judge the last completion."""
    client = OpenAI(base_url=base_url, api_key=api_key)
    messages = [{"role": "user", "content": data["prompt"]}]
    for _ in range(TURNS):
        message = client.chat.completions.create(model="policy", messages=messages).choices[0].message
        messages += [message.model_dump(), {"role": "user", "content": "again"}]


async def talks_for_the_judge(data: dict[str, Any], base_url: str, api_key: str, http_client: Any) -> None:
    await talks(data, base_url, api_key, http_client)


async def branches(data: dict[str, Any], base_url: str, api_key: str, http_client: Any) -> float:
    """Make a call, and another one that does not continue it."""
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)
    for content in (data["prompt"], "summary"):
        await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": content}])
    return 1.0


async def hides_errors(data: dict[str, Any], base_url: str, api_key: str, http_client: Any) -> float:
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client, max_retries=0)
    try:
        await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": data["prompt"]}])
    except openai.APIError:
        pass
    return 0.0


async def never_calls(data: dict[str, Any], base_url: str) -> float:
    return 1.0


async def counts_calls(data: dict[str, Any], base_url: str, api_key: str, http_client: Any) -> dict[str, Any]:
    """Call until the endpoint refuses, and tell its code."""
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client, max_retries=0)
    messages, calls = [{"role": "user", "content": data["prompt"]}], 0
    while True:
        try:
            reply = await client.chat.completions.create(model="policy", messages=messages)
        except openai.BadRequestError as error:
            return {"reward": 0.0, "answer": str(error.code), "metrics": {"calls": calls}}
        calls += 1
        messages += [reply.choices[0].message.model_dump(), {"role": "user", "content": data["prompt"]}]
