"""Trials with made-up spans, and the rules of the viewer."""
