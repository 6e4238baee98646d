"""Who answers the model: environments and tools in worker processes, and the conversations they have with an engine."""
