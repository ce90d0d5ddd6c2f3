"""Fuzzing of every decoder: seeded inputs, the decoders with the errors that they may raise, and the outcomes."""
