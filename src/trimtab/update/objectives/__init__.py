"""What an update minimises. Each file is one objective: of a policy, of worked answers, of a critic, of a reward model.

An objective says what a model has to say of samples (`estimate`) and what is minimised (`loss`), one micro-batch at a time. It
knows nothing of budgets, memory or devices: the Updater (updater.py) packs, runs and applies.
"""
