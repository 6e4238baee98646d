"""Says what is wrong with a machine or a run, from what evidence, and what to change. Changes nothing itself."""
