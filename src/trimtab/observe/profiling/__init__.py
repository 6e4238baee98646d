"""Profiles of a few steps: which kernels take the time, where the device waits, and what holds memory. See docs/runs.md."""
