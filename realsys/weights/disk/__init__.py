"""The transport ``disk``: sharded files, visible only through a manifest written last, verified before use."""
