"""The request-reply stream between the MasterWorker and the ModelWorkers: both ends under one name."""

from realsys.stream.endpoint import WorkerEndpoint
from realsys.stream.master.master_stream import MasterStream
from realsys.stream.worker_io import GroupIntake, Request

__all__ = ["GroupIntake", "MasterStream", "Request", "WorkerEndpoint"]
