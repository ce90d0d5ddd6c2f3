"""The batch script of a SLURM job, and settings for kinds of clusters; a package so that it is installed."""
