"""Trajectory -> reward. User functions run in worker processes that can be killed; a failure is never a zero reward.

`scorer.py` is the way in. This file stays empty: every worker imports it and must not pay for torch or pydantic.
"""
