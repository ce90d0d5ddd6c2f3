"""Best of n, then supervised: the best episode of each group is a demonstration (rejection sampling, ReST, RAFT).

Run it as it is, or with other settings:

    python best_of_n.py rollout.group_size=16
"""

import realsys

SETTINGS = ["experiment=arith", "train.ppo.minibatches=1"]


def likelihood(inputs):
    """Negative log-likelihood of each token. The ranks import this file for it."""
    return -inputs.theta


def train(session: realsys.Session) -> None:
    for _ in session.steps():
        batch = session.rollout.prepare_batch()
        if batch is None:
            break
        best = [max(rows, key=lambda row: batch.rewards[row]) for rows in batch.groups]
        right = [row for row in best if batch.samples[row].correct]
        if not right:
            batch.drop("no right answer")
            continue
        # No weights for staleness, and no advantage: every token of a demonstration counts.
        plain = {"use_decoupled_loss": False, "skip_zero_advantage": False}
        session.actor.train(batch.select(right), loss=likelihood, **plain)
        session.log(solved=len(right) / len(best))
        session.publish()
        session.evaluate_due()


if __name__ == "__main__":
    realsys.main(train, SETTINGS)
