"""The shipped configuration files; a package so that hydra finds them wherever realsys is installed."""
