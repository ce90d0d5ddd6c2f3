"""What SGLang's own interpreter imports from this folder, which is on its path."""
