"""Evaluations: statistics of their verdicts, majority votes, stored completions. Pure, without torch."""
