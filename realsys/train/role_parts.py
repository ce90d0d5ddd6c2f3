"""Builds a model role on one ModelWorker: its shard, and the packer that feeds it."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from realsys.config.roles import role_settings
from realsys.config.schema import Config
from realsys.train.calls.role import Role
from realsys.train.data_manager import DataManager
from realsys.train.megatron.device import Device
from realsys.train.megatron.mesh import MeshGroups
from realsys.train.megatron.train_engine import MegatronEngine
from realsys.train.packing import Packer

logger = logging.getLogger(__name__)


def make_role(
    config: Config, name: str, model: Path, groups: MeshGroups, data: DataManager, device: Device, *, trainable: bool
) -> Role:
    """Load this rank's shard of ``name`` from the HF directory ``model``. Every rank of its mesh
    must call it.

    ``trainable``: with gradients and an optimizer. Raises ConfigError for a role that is not
    configured, ModelError for a model that is unusable or does not fit the layout.
    """
    start = time.perf_counter()
    settings = role_settings(config, name)
    engine = MegatronEngine(config, settings, groups, device, trainable=trainable)
    engine.load(model)
    packer = Packer(
        data, device.device, multiple=engine.token_multiple, first=groups.first_stage, last=groups.last_stage
    )
    logger.info(
        "loaded %s from %s: %d parameters on this rank, %.1f s",
        name,
        model,
        engine.parameter_count,
        time.perf_counter() - start,
    )
    return Role(name, config, settings, engine, data, packer, device)
