"""SGLang as a rollout engine, in a process of its own: see outside/engine.py."""
