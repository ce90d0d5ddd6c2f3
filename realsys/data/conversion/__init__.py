"""The trial's own copy of its data: sources in other layouts, mixtures, and left-out long prompts."""
