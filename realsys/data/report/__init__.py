"""Report on a data set: `realsys data check`."""
