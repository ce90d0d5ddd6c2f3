"""Modules for SGLang's own interpreter, which has this folder on its path."""
