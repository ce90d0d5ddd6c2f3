"""On-policy distillation: the student samples, and each token is rewarded by the teacher's log-prob minus its own.

DIR is the teacher, a Hugging Face folder with the student's tokenizer:

    python distill.py roles.ref.path=DIR
"""

import realsys

# The preset has the teacher as the role ref, and the KL to it as the whole reward, token by token.
SETTINGS = ["experiment=arith", "algorithm=distill"]


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
