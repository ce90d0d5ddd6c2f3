"""Estimates of the costs of a recorded run, before its simulation corrects them."""
