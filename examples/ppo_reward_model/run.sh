#!/bin/sh
# A reward model from pairs, then PPO against it. Started again after a kill it goes on where it was.
set -e
here=$(dirname "$0")
trimtab reward-model "$here/1_reward_model.yaml" --resume
trimtab train "$here/2_ppo.yaml" --resume
