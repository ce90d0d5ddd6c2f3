"""Cost models of everything around the decisions: servers, RolloutWorkers, trainer, lengths."""
