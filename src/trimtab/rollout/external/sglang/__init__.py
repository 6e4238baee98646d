"""SGLang as a rollout engine, in a process of its own: see external/engine.py."""
