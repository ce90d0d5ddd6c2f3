"""The training loop that `realsys run` executes. `realsys init loop mine.py` writes this file for you to change.

Run your own with `realsys run train.loop=mine.py ...`, or as a program: `python mine.py experiment=arith`.
"""

import realsys


def train(session: realsys.Session) -> None:
    """Train until ``train.total_steps``, epochs or time are used up. Rollouts are sampled all the while.

    After a failure this function is called again, and ``steps`` goes on after the last checkpoint.
    """
    for _ in session.steps():
        # Groups of episodes, the oldest first; none was granted beyond asynchronous.max_staleness.
        batch = session.rollout.prepare_batch()
        if batch is None:  # the prompts are used up
            break
        # All calls of train.ppo.algorithm, which overlap where they use different ranks. One by one they are:
        #   session.compute(batch, "actor.logprobs", "ref.logprobs", "critic.values")  # those that you configure
        #   session.advantages(batch)  # of tokens: with a critic, or a KL in the reward
        #   session.actor.train(batch)
        #   session.critic.train(batch)
        session.update(batch)
        # Servers get the weights while the next step trains, the ledger learns which groups are in them, and every
        # checkpoint.every_steps the state is saved.
        session.publish()
        session.evaluate_due()


if __name__ == "__main__":
    realsys.main(train)
