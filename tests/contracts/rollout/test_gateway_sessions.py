"""Agents of one episode that name themselves with X-Session-ID."""

import asyncio

from tests.support.serving.gateways import USER, over_server, post


def test_sessions_are_apart(server, tokenizer):
    """A request that says it is a retry repeats only one of its own session; an excluded session is not trained."""

    async def run():
        async with over_server(server, tokenizer) as episode:
            body = {"model": "m", "messages": [USER]}
            for session, retry in (("solver", "0"), ("judge", "1"), ("judge", "1")):
                headers = {"X-Session-ID": session, "x-stainless-retry-count": retry}
                reply = await post(episode, "chat/completions", body, headers=headers)
                assert reply.status_code == 200
            capture = episode.session.capture
            both, returned = capture.rows(), [completion for _, completion in episode.engine.returned]
            capture.exclude({"judge"})
            return both, capture.rows(), returned

    both, solver, returned = asyncio.run(run())
    assert len(returned) == len(both) == 2 and len(solver) == 1
    assert solver[0].tokens[solver[0].loss_mask].tolist() == returned[0].tokens.tolist()
