"""On-policy distillation: the student samples, and each token is rewarded by the teacher's log-prob minus its own.

DIR is the teacher, a Hugging Face folder with the student's tokenizer:

    python distill.py roles.ref.path=DIR
"""

import realsys

SETTINGS = [
    "experiment=arith",
    # The teacher is the role ref. The KL to it is the whole reward, token by token: no verdict, nothing discounted.
    *("train.ppo.kl.coef=1", "train.ppo.kl.place=reward", "train.ppo.kl.estimator=k1", "train.ppo.reward_scale=0"),
    "train.ppo.skip_zero_advantage=false",
    *("train.ppo.gamma=0", "train.ppo.lam=1", "train.ppo.advantage.mean=none", "train.ppo.advantage.std=none"),
]


def train(session: realsys.Session) -> None:
    for _ in session.steps():
        batch = session.rollout.prepare_batch()
        if batch is None:
            break
        session.compute(batch, "actor.logprobs", "ref.logprobs")
        advantages = session.advantages(batch)  # of a token: log p_teacher - log p_student
        session.actor.train(batch)
        session.log(kl=advantages["kl_ref_mean"])
        session.publish()
        session.evaluate_due()


if __name__ == "__main__":
    realsys.main(train, SETTINGS)
