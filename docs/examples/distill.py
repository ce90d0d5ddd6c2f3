"""On-policy distillation: an algorithm with a model role and a call handler of the user.

    PYTHONPATH=docs/examples realsys run experiment=arith train.ppo.algorithm=distill:distill \
        train.ppo.skip_zero_advantage=false roles.teacher.path=DIR \
        allocation=serve.d1+actor.d1+teacher.d1
"""

from realsys.config.dataflow import Dataflow, FunctionCall
from realsys.config.schema import Config


def distill(config: Config) -> Dataflow:
    tokens, source = frozenset({"tokens"}), frozenset({"tokens", "behav_logprobs"})
    prox, teacher = frozenset({"prox_logprobs"}), frozenset({"ref_logprobs"})
    gain = frozenset({"advantages"})
    calls = [
        FunctionCall("teacher_inf", "teacher", "ref_inf", tokens, teacher),
        FunctionCall("actor_inf", "actor", "actor_inf", source, prox),
        FunctionCall("advantages", "actor", "distill:TeacherGain", source | teacher, gain),
        FunctionCall("actor_train", "actor", "actor_train", source | prox | gain, trains=True),
    ]
    return Dataflow(calls)


class TeacherGain:
    """advantage of a token = log p_teacher - log p_sampled; its mean is -KL(actor || teacher)."""

    def run(self, role, request):
        import torch  # here: launcher and master import this module, and need no torch

        from realsys.train.worker.call_handlers import CallOutcome
        from realsys.train.worker.optimizer_steps import token_means

        stats = {"tokens": torch.zeros(()), "advantage_sum": torch.zeros(())}
        for ref in role.own_sequences(request) if role.groups.last_stage else ():
            gain = role.data.get(ref.sample_id, "ref_logprobs") - role.data.get(ref.sample_id, "behav_logprobs")
            role.data.put(ref.sample_id, {"advantages": gain})
            stats["tokens"] += len(gain)
            stats["advantage_sum"] += float(gain.sum())
        return CallOutcome(token_means(stats, role))  # the step log has them as advantages/...
