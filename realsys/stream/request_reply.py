"""The request-reply stream between the MasterWorker and the ModelWorkers: both ends under one name."""

from realsys.stream.endpoint import Request, WorkerEndpoint
from realsys.stream.master_stream import MasterStream

__all__ = ["MasterStream", "Request", "WorkerEndpoint"]
