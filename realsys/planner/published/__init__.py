"""The cost model against published tables: asynchronous training over synchronous training."""
