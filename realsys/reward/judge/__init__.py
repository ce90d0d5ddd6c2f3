"""Judge: completions are judged by a model behind an OpenAI endpoint (``data.verifier=judge``, docs/rewards.md)."""
