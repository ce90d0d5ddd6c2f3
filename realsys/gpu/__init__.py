"""Processes on GPUs: choice of the device and of the attention kernel, peak rates, meters."""
