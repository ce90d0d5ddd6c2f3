"""Configurations for tests, without hydra: composing through it takes a second per ten cases."""

import functools

import yaml

from realsys.config.compose import compose, validate
from realsys.config.schema import Config


@functools.cache
def shipped(experiment: str) -> Config:
    return compose([f"experiment={experiment}"])


def changed(*overrides: str, experiment: str = "arith") -> Config:
    """A shipped experiment with fields set, `path=value` each; validated as after composition."""
    tree = shipped(experiment).model_dump()
    for text in overrides:
        path, _, value = text.partition("=")
        *sections, name = path.split(".")
        section = functools.reduce(lambda node, key: node[key], sections, tree)
        section[name] = yaml.safe_load(value)
    return validate(tree)
