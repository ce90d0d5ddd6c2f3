"""Each framework sends its history back in a form of its own; a linear conversation stays one row.

The completions are scripted, with reasoning, text and tool calls: all that a framework may drop or write otherwise.
"""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from realsys.data.arith import write_char_tokenizer
from realsys.data.tokenizer import TextTokenizer
from realsys.generation.completion import Completion
from tests.support.agents import one_conversation
from tests.support.agents.one_conversation import CONVERSATIONS
from tests.support.agents.trained import FRAMEWORKS, needs_frameworks
from tests.support.serving.gateways import Scripted, opened

CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "2+3"}}</tool_call>'
TWO_CALLS = [f"<think>hm</think>I add. {CALL}{CALL.replace('2+3', '1+4')}", "<think>ok</think>The result is 5. "]
TEXTS = {
    "smolagents_tools": [
        f"<think>hm</think>I add. {CALL}",
        '<tool_call>{"name": "final_answer", "arguments": {"answer": "5"}}</tool_call>',
    ],
    "smolagents_code": ["I add.\n<code>\nprint(5)\n</code>", "Done.\n<code>\nfinal_answer(5)\n</code>"],
}


class Stopping(Scripted):
    """A scripted engine that obeys stop strings."""

    def _completion(self, call):
        whole = super()._completion(call)
        text = self.tokenizer.decode(whole.tokens.tolist())
        ends = [place + len(stop) for stop in call.spec.stop if (place := text.find(stop)) >= 0]
        if not ends:
            return whole
        tokens = np.array(self.tokenizer.encode_text(text[: min(ends)]), np.int32)
        n = len(tokens)
        return Completion(tokens, whole.logprobs[:n], whole.versions[:n], "stop", (("only", n),))


async def converse(framework, tokenizer):
    engine = Stopping(tokenizer, TEXTS.get(framework, TWO_CALLS))
    settings = ("data.max_prompt_tokens=20000", "generation.sampling.max_new_tokens=400")
    async with opened(engine, tokenizer, *settings) as episode:
        script = Path(one_conversation.__file__)
        where = (episode.session.base_url, episode.session.api_key)
        process = await asyncio.create_subprocess_exec(FRAMEWORKS, script, framework, *where, stdout=-1, stderr=-1)
        try:
            out, problem = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode == 0, problem.decode()[-2000:]
        capture = episode.session.capture
        return out.decode(), capture.rows(), capture.metrics(), episode.engine.returned


@pytest.mark.parametrize("framework", CONVERSATIONS)
def test_linear_conversation_is_one_row(framework, tmp_path):
    needs_frameworks()
    write_char_tokenizer(tmp_path, chat=True)
    answer, rows, metrics, returned = asyncio.run(converse(framework, TextTokenizer(tmp_path)))
    assert "5" in answer and len(returned) == 2
    assert len(rows) == 1 and metrics["gateway/branches"] == 0
    context, last = returned[-1]
    assert rows[0].tokens.tolist() == [*context, *last.tokens.tolist()]
    assert rows[0].loss_tokens == sum(len(completion.tokens) for _, completion in returned)
