"""What a model function call does with a role's engine: one class per interface, found by name.

    call            reads                                     leaves                                  module
    actor_inf       tokens                                    prox_logprobs                           inference.py
    ref_inf         tokens                                    ref_logprobs                            inference.py
    critic_inf      tokens                                    values                                  inference.py
    reward_inf      tokens                                    scores, in the reply                    inference.py
    advantages      log-probs, ref_logprobs, values           advantages, returns                     advantages.py
    actor_train     tokens, log-probs, advantages             one optimizer step per minibatch        actor.py
    critic_train    tokens, values, returns                   one optimizer step per minibatch        critic.py
    sft             tokens                                    one optimizer step per minibatch        sft.py

Every rank of the role's mesh runs the same call; what it needs to know of the others it derives from the request, in
which all ranks' sequences stand.
"""

from realsys.train.interfaces.actor import ActorTrain
from realsys.train.interfaces.advantages import Advantages
from realsys.train.interfaces.critic import CriticTrain
from realsys.train.interfaces.inference import ActorInference, CriticInference, ReferenceInference, RewardInference
from realsys.train.interfaces.registry import (
    INTERFACES,
    CallOutcome,
    Interface,
    find_interface,
    register_interface,
)
from realsys.train.interfaces.role import Role
from realsys.train.interfaces.sft import Sft
from realsys.train.interfaces.statistics import token_means
from realsys.train.interfaces.steps import OptimizerSteps

__all__ = [
    "INTERFACES",
    "ActorInference",
    "ActorTrain",
    "Advantages",
    "CallOutcome",
    "CriticInference",
    "CriticTrain",
    "Interface",
    "OptimizerSteps",
    "ReferenceInference",
    "RewardInference",
    "Role",
    "Sft",
    "find_interface",
    "register_interface",
    "token_means",
]
