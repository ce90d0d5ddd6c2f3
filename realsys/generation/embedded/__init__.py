"""The embedded engine: continuous batching in plain torch, in the GenerationServer process (docs/generation.md)."""
