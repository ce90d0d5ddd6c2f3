"""GRPO, call by call: group advantages, the decoupled loss, and a KL to the reference.

As a program, which goes on after its last checkpoint however it has ended, or in the MasterWorker:

    python grpo.py trial=mine seed=2
    realsys run train.loop=grpo.py experiment=arith train.ppo.kl.coef=0.01
"""

import realsys

SETTINGS = ["experiment=arith", "train.ppo.kl.coef=0.01"]  # the KL loads the reference


def train(session: realsys.Session) -> None:
    for _ in session.steps():
        # train.batch_groups groups of rollout.group_size episodes; generation goes on while the script works.
        batch = session.rollout.prepare_batch()
        if batch is None:  # train.total_epochs are used up
            break
        # Log-probs of the weights before the step, and of the reference: the ranks compute both at the same time.
        session.compute(batch, "actor.logprobs", "ref.logprobs")
        # train.ppo.minibatches optimizer steps. Advantages: rewards minus their group's mean (train.ppo.advantage).
        stats = session.actor.train(batch)
        session.log(solved=sum(batch.rewards[rows].max() > 0 for rows in batch.groups), lr=stats["lr"])
        # The servers get the weights; the ledger learns that these groups are in them.
        session.publish()
        session.evaluate_due()


if __name__ == "__main__":
    realsys.main(train, SETTINGS)
