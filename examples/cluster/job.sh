#!/bin/sh
# Submits a run as a Ray job: HEAD=10.0.0.1 examples/cluster/job.sh config.yaml [key=value ...]
# The folder that you are in travels with it. Submitted again, it resumes.
set -eu
exec ray job submit --address "http://${HEAD:?the head of the Ray cluster}:8265" --working-dir . --no-wait -- \
  trimtab train --resume "$@"
