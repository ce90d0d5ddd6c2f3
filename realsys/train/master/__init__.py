"""The MasterWorker's library: the executor of the dataflow graph, the step loop and its phases.

Metadata only, no torch.
"""
