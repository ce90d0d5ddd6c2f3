"""One copy of a weight version per host: one server stages it, the others and other hosts read it."""
