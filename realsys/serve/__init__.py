"""The training service, which speaks the Tinker protocol: `realsys serve`."""
