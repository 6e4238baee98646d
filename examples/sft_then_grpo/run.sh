#!/bin/sh
# Worked answers, then reinforcement learning. Started again after a kill it goes on where it was.
set -e
here=$(dirname "$0")
trimtab sft "$here/1_sft.yaml" --resume
trimtab train "$here/2_grpo.yaml" --resume
