"""The MasterWorker's library: the dataflow graph, its executor, and the step loop. Metadata only, no torch."""
