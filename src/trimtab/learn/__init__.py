"""Pure tensor functions of reinforcement learning on packed tensors. No I/O, no devices, no torch.distributed."""
