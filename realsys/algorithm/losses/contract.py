"""The contract of a policy loss: a function of ``LossInputs`` that returns one number per token.

    inputs ──your function──> token loss [t] ──shared code──> weights, penalties, mask, aggregation

    def spo(inputs: LossInputs, eps: float = 0.2) -> Tensor:  # train.ppo.loss=my_module:spo
        penalty = inputs.advantages.abs() / (2 * eps) * (inputs.u - 1) ** 2
        return penalty - inputs.u * inputs.advantages

The function runs once per micro-batch, on every rank of the last pipeline stage. The entries of
``train.ppo.loss_args`` are its keyword arguments. Behaviour weight w, KL and entropy penalties,
masks, aggregation and statistics are not its work: ``realsys.algorithm.loss.actor_loss`` adds them
to every loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from realsys.algorithm.loss_tokens import Segments
from realsys.config.schema_train import PPOConfig


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Arguments of a loss. Every tensor is ``[t]``, one entry per loss token of the micro-batch.

    t is 0 on a data rank that has fewer rows than others.

    theta       float32  log-probs under the weights being trained; has a gradient
    prox        float32  log-probs under the weights before the step's first update; between ``behav`` and
                         theta if ``cfg.use_decoupled_loss`` is interpolated, equal to ``behav`` if it is off
    behav       float32  log-probs recorded when the tokens were sampled
    u           float32  exp(theta - prox); has the gradient of theta
    w           float32  exp(prox - behav) before its cap, no gradient. Shared code multiplies the
                         token loss by w, so the loss must leave it out
    advantages  float32
    mask        bool     True where a token counts. Elsewhere log-probs and advantages are 0, and
                         the returned loss may be anything, NaN included: it is not used
    segments             row and episode of each token; None if the caller does not know them
    cfg                  ``train.ppo``
    top_theta   float32  [t, k], as theta, of the tokens that the teacher finds most probable at each token; has a
                         gradient. None unless the loss takes an argument ``top_k``, which is k
    top_teacher float32  [t, k], log-probs of the same tokens under the teacher

    An ``episode_level`` loss gets the u and w of episodes instead.
    """

    theta: Tensor
    prox: Tensor
    behav: Tensor
    u: Tensor
    w: Tensor
    advantages: Tensor
    mask: Tensor
    segments: Segments | None
    cfg: PPOConfig
    top_theta: Tensor | None = None
    top_teacher: Tensor | None = None

    @property
    def clipped_u(self) -> Tensor:
        """``u`` within [1 - eps_clip, 1 + eps_clip_higher], float32 [t]."""
        higher = self.cfg.eps_clip_higher or self.cfg.eps_clip
        return self.u.clamp(1 - self.cfg.eps_clip, 1 + higher)


@dataclass(frozen=True, slots=True)
class Surrogate:
    """Token losses, and the tokens that a clip holds: ``clip_fraction``, ``dual_clip_fraction``.

    loss          float32 [t]  before the behaviour weight w
    clipped       bool [t]     tokens that the clip holds; None: the loss has no clip
    dual_clipped  bool [t]     the same for a dual clip
    """

    loss: Tensor
    clipped: Tensor | None = None
    dual_clipped: Tensor | None = None


#: ``(inputs, **loss_args)`` -> token losses float32 [t], before w
Loss = Callable[..., Tensor | Surrogate]

Function = TypeVar("Function", bound=Loss)


def episode_level(loss: Function) -> Function:
    """Mark a loss whose ratios are those of a whole episode (decorator).

    Each token then has the u and the w of its episode: exp of the mean log ratio over all counted
    tokens of the episode's rows in the micro-batch. The gradient of u stays the token's own
    (GSPO-token).
    """
    loss.episode_level = True  # type: ignore[attr-defined]
    return loss


@dataclass(frozen=True, slots=True)
class ConfiguredLoss:
    """A loss with its arguments. ``name`` is its name in the configuration."""

    name: str
    function: Loss
    arguments: dict[str, Any]

    @property
    def episode_level(self) -> bool:
        return bool(getattr(self.function, "episode_level", False))

    def __call__(self, inputs: LossInputs) -> Surrogate:
        """Return the token losses. Raises ValueError if they are not one number per token."""
        result = self.function(inputs, **self.arguments)
        surrogate = result if isinstance(result, Surrogate) else Surrogate(result)
        for name in ("loss", "clipped", "dual_clipped"):
            tensor = getattr(surrogate, name)
            if tensor is not None or name == "loss":
                self._check_shape(name, tensor, inputs)
        return surrogate

    def _check_shape(self, name: str, tensor: object, inputs: LossInputs) -> None:
        """Refuse a mean in place of token losses: it would broadcast and train something else."""
        if isinstance(tensor, Tensor) and tensor.shape == inputs.mask.shape:
            return
        got = f"shape {list(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
        needed = f"a tensor of shape {list(inputs.mask.shape)}, one entry per token"
        raise ValueError(f"train.ppo.loss={self.name}: {name} has {got}: return {needed}")
