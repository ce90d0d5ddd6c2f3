"""The agent ``multi_turn``: after a wrong completion it adds feedback and tries again, in one growing row.

    prompt ──> completion ──> judge ──right, done, cut off, last turn, no room──> end: reward of this judgement
                  ^             └─ wrong ──> feedback (tokenised alone, mask False) ──┐
                  └─────────────────────────────────────────────────────────────────┘

With an environment that has steps, the prompt is followed by the observation of ``reset``, ``step`` judges, and only
``done`` tells that the episode is over. Each step's reward counts once: in the reward of the episode, or with
``train.ppo.turn_rewards`` at the last token of its turn; that of the last step always in the reward of the episode.

Only the feedback is tokenised; sampled tokens stay unchanged, with the end-of-text token.
"""

from __future__ import annotations

from realsys.config.doors import ENVIRONMENT, has_steps
from realsys.config.schema import Config
from realsys.config.trial_sizes import longest_sequence
from realsys.data.tokenizer import TextTokenizer
from realsys.errors import AgentError, ConfigError, DataError
from realsys.generation.completion import Completion
from realsys.rollout.agents.contract import AgentParts, Session
from realsys.rollout.environments import Judgement, StepEnvironment, Task
from realsys.rollout.episodes import RowBuilder
from realsys.types import Episode

#: Lower case without newlines, so that the character tokenizer of the tiny model knows every character.
FEEDBACK = "that is wrong; try again"
PROMPT = "{prompt}"  # replaced by the text of the prompt in the feedback
TEMPLATE_TOKENS = 64  # upper bound on the tokens that a chat template adds around a user turn


class MultiTurn:
    """Agent for a problem with up to ``max_turns`` tries. The reward of try k, from 0, counts turn_discount^k times."""

    plays_steps = True

    def __init__(
        self,
        parts: AgentParts,
        max_turns: int = 2,
        feedback: str = FEEDBACK,
        feedback_tokens: int = 0,
        turn_discount: float = 1.0,
    ) -> None:
        """Check the arguments. Raises ConfigError if one is out of bounds, or the template cannot add a turn."""
        self._parts = parts
        self._max_turns = max_turns
        self._feedback = feedback
        self._turn_discount = turn_discount
        self._limit = longest_sequence(parts.config)
        self.longest_row(parts.config, max_turns, feedback, feedback_tokens, turn_discount)
        self.check(parts.config, parts.tokenizer, max_turns, feedback, feedback_tokens)

    @staticmethod
    def longest_row(
        config: Config,
        max_turns: int = 2,
        feedback: str = FEEDBACK,
        feedback_tokens: int = 0,
        turn_discount: float = 1.0,
    ) -> int:
        """Return the tokens of the longest prompt with ``max_turns`` completions and the feedback between them.

        ``feedback_tokens`` bounds one feedback turn, and the first observation of an environment with steps; 0: enough
        for ``feedback``, at one token per byte.
        Raises ConfigError.
        """
        field = "rollout.agent_args"
        if type(max_turns) is not int or max_turns < 1:
            raise ConfigError(f"{field}.max_turns", max_turns, "must be an integer of at least 1")
        if not isinstance(feedback, str) or not feedback:
            raise ConfigError(f"{field}.feedback", feedback, "must be a text that is not empty")
        if type(feedback_tokens) is not int or feedback_tokens < 0:
            raise ConfigError(f"{field}.feedback_tokens", feedback_tokens, "must be an integer of at least 0")
        if type(turn_discount) not in (int, float) or not 0 < turn_discount <= 1:
            raise ConfigError(f"{field}.turn_discount", turn_discount, "must be a number above 0, and at most 1")
        prompt = config.data.max_prompt_tokens
        if not feedback_tokens:
            feedback_tokens = len(feedback.replace(PROMPT, "").encode()) + prompt * feedback.count(PROMPT)
            feedback_tokens += TEMPLATE_TOKENS * config.data.chat_template
        texts = max_turns - 1 + has_steps(ENVIRONMENT.load(config.rollout.environment))
        return prompt + max_turns * config.generation.sampling.max_new_tokens + texts * feedback_tokens

    @staticmethod
    def check(
        config: Config,
        tokenizer: TextTokenizer,
        max_turns: int = 2,
        feedback: str = FEEDBACK,
        feedback_tokens: int = 0,
        turn_discount: float = 1.0,
    ) -> None:
        """Raise ConfigError if the model's chat template cannot add a user turn, or the feedback has no tokens."""
        try:
            tokens = tokenizer.encode_user_turn(feedback.replace(PROMPT, ""), chat=config.data.chat_template)
        except DataError as error:
            raise ConfigError("rollout.agent", config.rollout.agent, str(error)) from None
        if not tokens and PROMPT not in feedback:
            problem = "has no tokens in the model's vocabulary: use other characters"
            raise ConfigError("rollout.agent_args.feedback", feedback, problem)

    async def run(self, task: Task, session: Session) -> Episode:
        """Play turns until one is right or no other is possible. The last judgement counts, or the rewards of all
        steps.
        """
        environment, verdicts = self._parts.environment, list[bool | None]()
        steps = environment if isinstance(environment, StepEnvironment) else None
        judge = steps.step if steps is not None else environment.judge
        row = RowBuilder(task.prompt.ids if steps is None else await self._opening(task, steps))
        in_episode = at_tokens = 0.0  # rewards of the earlier steps
        while True:
            completion = await session.generate(row.tokens)
            row.completion(completion)
            judgement = await judge(task, self._parts.response(completion, turn=len(verdicts)))
            reward = judgement.reward
            if self._turn_discount != 1.0:
                reward *= self._turn_discount ** len(verdicts)
            verdicts.append(judgement.correct)
            done = judgement.done or (judgement.correct is True and steps is None)
            if done or completion.finish_reason != "stop" or len(verdicts) == self._max_turns:
                break
            tail = self._tail(task, judgement, completion)
            if len(row) + len(tail) + self._parts.config.generation.sampling.max_new_tokens > self._limit:
                break
            if steps is not None and self._has_own_reward(task, completion):
                row.reward(reward)
                at_tokens += reward
            elif steps is not None:
                in_episode += reward
            row.context(tail)
        metrics = _metrics(judgement, verdicts)
        if steps is not None:
            reward += in_episode
            metrics["return"] = reward + at_tokens
        return Episode([row.row()], reward, judgement.correct, metrics, judgement.answer)

    async def _opening(self, task: Task, steps: StepEnvironment) -> list[int]:
        """Tokens of the prompt, and of the first observation if there is one."""
        observation, prompt, config = await steps.reset(task), task.prompt, self._parts.config
        if not observation:
            return prompt.ids
        remedy = "let reset return None, and put its text into the prompts"
        try:
            chat, text = config.data.chat_template, prompt.messages or prompt.text
            tokens = self._parts.tokenizer.encode_two_turns(text, observation, chat=chat)
        except DataError as error:
            raise AgentError(f"the observation of reset cannot follow the prompt: {error}: {remedy}") from None
        if (room := self._limit - len(tokens) - config.generation.sampling.max_new_tokens) < 0:
            problem = f"the observation of reset is {-room} tokens too long for a row of {self._limit}"
            raise AgentError(f"{problem}: set rollout.agent_args.feedback_tokens", defect="observation too long")
        return tokens

    def _has_own_reward(self, task: Task, completion: Completion) -> bool:
        """Return True if the reward of a step is trained at its turn. An empty or greedy one has no token for it."""
        trained = self._parts.config.train.ppo.turn_gamma is not None and task.ticket.kind == "train"
        return trained and len(completion.tokens) > 0 and completion.trainable

    def _tail(self, task: Task, judgement: Judgement, completion: Completion) -> list[int]:
        """Tokens of the feedback turn. A completion that ended with an end-of-text token needs no second one."""
        text = judgement.feedback or self._feedback.replace(PROMPT, task.prompt.text)
        tail = self._parts.tokenizer.encode_user_turn(text, chat=self._parts.config.data.chat_template)
        ends = self._parts.tokenizer.eos_token_ids
        ended = len(completion.tokens) and int(completion.tokens[-1]) in ends
        return tail[1:] if ended and tail and tail[0] in ends else tail


def _metrics(judgement: Judgement, verdicts: list[bool | None]) -> dict[str, float]:
    metrics = judgement.metrics | {"turns": float(len(verdicts))}
    for name, correct in (("correct_first", verdicts[0]), ("correct_last", verdicts[-1])):
        if correct is not None:
            metrics[name] = float(correct)
    return metrics
