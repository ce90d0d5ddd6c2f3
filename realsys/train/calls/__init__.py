"""Call handlers: one class for each kind of model function call.
``realsys.config.doors.CALL_HANDLER`` lists their names.

    handler         reads                                     makes                                   module
    actor_inf       tokens                                    prox_logprobs                           inference.py
    ref_inf         tokens                                    ref_logprobs                            inference.py
    critic_inf      tokens                                    values                                  inference.py
    reward_inf      tokens                                    scores, in the reply                    inference.py
    advantages      log-probs, ref_logprobs, values           advantages, returns                 token_advantages.py
    actor_train     tokens, log-probs, advantages             one optimizer step per minibatch        actor.py
    critic_train    tokens, values, returns                   one optimizer step per minibatch        critic.py
    sft             tokens                                    one optimizer step per minibatch        sft.py

Every rank of the role's mesh runs the same call. The request lists the sequences of all ranks, which
these have exchanged (``realsys.train.exchange``), so each rank computes what it must know about the others.
"""

from realsys.train.calls.actor import ActorTrain
from realsys.train.calls.critic import CriticTrain
from realsys.train.calls.handlers import CallHandler, CallOutcome, find_handler
from realsys.train.calls.inference import ActorInference, CriticInference, ReferenceInference, RewardInference
from realsys.train.calls.reductions import token_means
from realsys.train.calls.role import Role
from realsys.train.calls.sft import Sft
from realsys.train.calls.token_advantages import Advantages
from realsys.train.calls.train_steps import OptimizerSteps

__all__ = [
    "ActorInference",
    "ActorTrain",
    "Advantages",
    "CallHandler",
    "CallOutcome",
    "CriticInference",
    "CriticTrain",
    "OptimizerSteps",
    "ReferenceInference",
    "RewardInference",
    "Role",
    "Sft",
    "find_handler",
    "token_means",
]
