"""Sizes that both the device code and the plan use. They are in a module of their own because the plan imports no torch."""

from __future__ import annotations

FUSED_FAMILIES = {
    "cohere", "cohere2", "exaone4", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "gpt_oss", "granite", "llama", "ministral",
    "mistral", "mixtral", "olmo2", "olmo3", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3",
    "vaultgemma",
}  # fmt: skip
"""Model families (`model_type`) that have fused layers (model/parts.py)."""
TOKEN_SUM_PROGRAMS = 2112
"""Most Triton programs of a kernel that sums over tokens (model/kernels/train.py): 16 for each multiprocessor of an H200."""
HEAD_TILE_VOCAB = 256
"""Vocabulary entries that the head's kernel reduces at a time (model/kernels/head.py)."""
REWARD_ROW_TOKENS = 8192
"""Most tokens in one packed row that a reward model scores (reward/models.py)."""
MAX_PIECE_ELEMENTS = 2**26
"""Most elements of a unit that an offloaded optimizer step moves as one piece (update/optimizer.py)."""
PIECES_ON_DEVICE = 3
"""Pieces that are on the device at a time (update/state_streamer.py): one arrives, one is updated, one leaves."""
BLOCK = 256
"""Elements in a block. 8-bit moments have one scale for each block (update/eightbit.py), and every parameter starts at a multiple
of it (model/weights.py)."""
MOMENT_CHUNK_ELEMENTS = 2**22
"""Most elements whose 8-bit moments are unpacked to full precision at a time (update/eightbit.py)."""
READ_CHUNK_ELEMENTS = 2**23
"""Most elements of a stored weight that are widened at a time (model/quantised.py), in each of `READ_THREADS` threads."""
READ_THREADS = 4
"""Threads in which transformers reads weights."""
MERGE_CHUNK_ELEMENTS = 2**23
"""Most elements of a weight that are in float32 at a time while adapters are merged into a copy of it (rollout/native/fused.py).
Without this limit, one layer of a large model would take half a GiB."""
MAX_QUANTISED_ELEMENTS = 2**22
"""Elements that are put into codes at a time: what is made on the way takes several times their memory."""
FP8_BLOCK, FOUR_BIT_BLOCK = 128, 64
"""Rows and columns that share a scale in 8 bits, and elements that share one in 4 (model/codes.py)."""


def prompt_slots(rows: int) -> int:
    """Slots that the native engine has for what layers carry at the end of prompts, beside those of its rows: as many prompts may
    be filled, or wait to be forked."""
    return min(rows, 8 + rows // 4)
