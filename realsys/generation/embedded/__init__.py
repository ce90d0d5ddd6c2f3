"""The embedded engine: continuous batching in plain torch, inside the GenerationServer process (docs/generation.md)."""
