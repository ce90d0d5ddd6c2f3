"""A request whose model is the name of a pinned version: an opponent that is not trained."""

import asyncio
import dataclasses

from tests.support.serving.gateways import USER, Scripted, opened


class Pinned(Scripted):
    """Marks the completions of ``opponent``, as the manager's pins do; any other name is the policy in training."""

    def _completion(self, call):
        assert call.or_trained == bool(call.policy)
        policy = call.policy if call.policy == "opponent" else ""
        return dataclasses.replace(super()._completion(call), policy=policy)


def test_opponent_of_another_model_is_not_trained(tokenizer):
    """Its words are context of the one row that the two share; a conversation of its own is no row."""

    async def run():
        async with opened(Pinned(tokenizer, ["2", "3", "4", "5"]), tokenizer) as episode:
            client, messages = episode.sdk(), [USER]
            for model in ("gpt", "opponent", "policy"):
                reply = await client.chat.completions.create(model=model, messages=messages)
                messages += [{"role": "assistant", "content": reply.choices[0].message.content}, USER]
            own = [{"role": "user", "content": "3+3="}]
            await client.chat.completions.create(model="opponent", messages=own)
            capture = episode.session.capture
            return capture.rows(), capture.last(), episode.engine

    rows, last, engine = asyncio.run(run())
    [row], sampled = rows, [completion.tokens.tolist() for _, completion in engine.returned]
    assert row.tokens[row.loss_mask].tolist() == sampled[0] + sampled[2]
    assert [call.policy for call in engine.calls] == ["gpt", "opponent", "", "opponent"]
    assert (last.text, last.turn) == ("4", 1)
