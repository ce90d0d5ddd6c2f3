"""Weight versions, from the ranks to the servers: the contract of a transport, and ``disk``."""
