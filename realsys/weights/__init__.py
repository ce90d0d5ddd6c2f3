"""Weight transports: the contract, and the built-in transport ``disk``."""
