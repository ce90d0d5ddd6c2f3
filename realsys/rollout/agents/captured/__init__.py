"""Agents with ``base_url``: the gateway records their calls."""
