"""Sizes that code on a device works with and that a plan counts with. They are here because a plan imports no torch."""

from __future__ import annotations

FUSED = {"llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3", "granite"}
"""Families of models that fused layers serve (model/parts.py)."""
PROGRAMS = 2112
"""Programs of kernels that sum over tokens (model/kernels/train.py): sixteen for each multiprocessor of an H200."""
HEAD_TILE = 256
"""Words of the vocabulary that the head's kernel reduces at a time (model/kernels/head.py)."""
REWARD_TOKENS = 8192
"""Tokens of a row that a reward model scores at a time (reward/models.py)."""
PIECE = 2**26
"""Elements of a unit of weights, at most, that an offloaded optimizer step has in one piece (update/optimizer.py)."""
SLOTS = 3
"""Pieces that are on the device at a time (update/state_streamer.py): one on its way in, one worked on, one on its way out."""
BLOCK = 256
"""Elements that share a scale where moments have 8 bits (update/eightbit.py), and to a multiple of which weights begin
(model/weights.py)."""
CHUNK = 2**22
"""Elements whose 8-bit moments exist in full at one time (update/eightbit.py)."""
MERGED_AT_ONCE = 2**23
"""Elements of a weight that are in float32 at a time while adapters are added to a copy of it (rollout/native/fused.py): a whole
layer of a large model is half a GiB."""
