"""Completions that a RolloutWorker keeps on disk for people: those of evaluations, and groups that were not trained."""
