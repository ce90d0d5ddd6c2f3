"""Loading what a run exports the way a user does: with transformers, offline."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel


def load_checkpoint(path: Path, text: str) -> PreTrainedModel:
    """The model of an HF directory, after it has read ``text`` with the directory's own tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(path, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
    assert ids.numel() > 0
    with torch.no_grad():
        assert torch.isfinite(model(ids).logits).all()
    return model


def weights_differ(first: PreTrainedModel, second: PreTrainedModel) -> list[str]:
    """Names of the parameters in which two models of one architecture are not equal."""
    others = dict(second.named_parameters())
    mine = dict(first.named_parameters())
    assert mine.keys() == others.keys()
    return [name for name, tensor in mine.items() if not torch.equal(tensor.float(), others[name].float())]
