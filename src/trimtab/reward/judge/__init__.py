"""A language model as a reward: any OpenAI-compatible endpoint is asked for a score of each completion.

`reward.py` is the way in. A judge runs in a process of its own (`process.py`), in which all calls are under way at once:
one limit on requests in flight, one cache and one set of numbers, however many reward workers there are.
"""
